"""Two sets of parameter tensors: one live, one that the next version is received into.

Invariants:
- A swap exchanges pointers, never contents: O(number of tensors), whatever their size.
- Tied parameters are one tensor under one name (the first), and stay tied through any swap.
- The staging tensors of a name never alias its live tensor.
"""

from __future__ import annotations

import torch

from asyncrl.errors import GeneratorError


class DoubleBufferedWeights:
    """The parameters of ``model``, by Hugging Face name, and as much memory again for staging.

    The second set is allocated when ``staging`` is first called. Swap only while no forward pass
    runs; staging may be filled at any other time, from any thread.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # Taken outside inference mode, or receivers could not write into them later.
        with torch.inference_mode(False):
            self._parameters = dict(model.named_parameters())
            self._live = {name: parameter.data for name, parameter in self._parameters.items()}
        self._staging: dict[str, torch.Tensor] | None = None

    def live(self) -> dict[str, torch.Tensor]:
        """The tensors that the model computes with now."""
        return dict(self._live)

    def staging(self) -> dict[str, torch.Tensor]:
        """The tensors to fill; other ones after each swap, so ask again for each push."""
        if self._staging is None:
            with torch.inference_mode(False):
                self._staging = {name: torch.empty_like(tensor) for name, tensor in self._live.items()}
        return dict(self._staging)

    @property
    def staging_bytes(self) -> int:
        """Memory of the second set, which is there from the first call of ``staging`` on."""
        return sum(tensor.nbytes for tensor in (self._staging or {}).values())

    def require_staged(self) -> dict[str, torch.Tensor]:
        """The staging tensors; raises GeneratorError where nobody ever asked for them to fill them."""
        if self._staging is None:
            raise GeneratorError(
                f"0 of {len(self._live)} tensors were staged for the swap: fill those of stage() first"
            )
        return self._staging

    def swap(self) -> None:
        """Make the staged tensors live, and the live ones the next staging area."""
        self._live, self._staging = self.require_staged(), self._live
        for name, parameter in self._parameters.items():
            parameter.data = self._live[name]
