"""The example families: every row's own solution earns the full reward, and near misses earn none."""

from __future__ import annotations

import re
import statistics

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.environments.protocol import as_step
from asyncrl.examples import addition, calculator, chain_sum, counting, gsm8k, guessing
from asyncrl.rewards.builtin import last_number

numbers = st.integers(min_value=1, max_value=10**6)


@given(numbers, numbers)
def test_addition_solution_works_out_each_column_and_ends_in_the_sum(a: int, b: int) -> None:
    working, _, final = addition.solution(a, b).partition(addition.MARK)
    assert final == str(a + b)
    digits = ""
    for column in working.split(","):
        terms, _, total = column.partition("=")
        assert sum(map(int, terms.split("+"))) == int(total)
        digits = total[-1] + digits
    carried = total[:-1]
    assert carried + digits == final


@given(numbers, numbers)
def test_addition_reward_is_for_the_exact_final_number(a: int, b: int) -> None:
    text, answer = addition.solution(a, b), str(a + b)
    assert addition.reward(text, answer) == 1.0
    assert addition.reward(f"junk{addition.MARK}{answer}", answer) == 1.0
    for wrong in (answer, f"{text} ", f"{text}0", text[:-1], f"{text}{addition.MARK}", ""):
        assert addition.reward(wrong, answer) == 0.0, wrong


def test_addition_rows_are_distinct_seeded_and_longer_in_answer_than_in_question() -> None:
    rows = addition.rows(digits=3, count=2000, seed=1)
    assert rows == addition.rows(digits=3, count=2000, seed=1)
    assert rows != addition.rows(digits=3, count=2000, seed=2)
    assert len({row["question"] for row in rows}) == len(rows) == 2000
    for row in rows:
        a, b = row["question"].removesuffix("=").split("+")
        assert int(a) + int(b) == int(row["answer"])
        assert row["solution"] == addition.solution(int(a), int(b))
    lengths = [len(row["solution"]) for row in rows]
    assert statistics.mean(lengths) > 2 * statistics.mean(len(row["question"]) for row in rows)
    assert len(set(lengths)) > 5


@pytest.mark.parametrize(("digits", "count"), [(1, 5), (2, 0), (2, 90 * 90)])
def test_addition_refuses_impossible_sizes(digits: int, count: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        addition.rows(digits=digits, count=count)


def test_counting_lengths_have_a_long_tail_within_the_bound() -> None:
    rows = counting.rows(count=4000, median=8, sigma=0.8, maximum=60, seed=3)
    assert rows == counting.rows(count=4000, median=8, sigma=0.8, maximum=60, seed=3)
    counts = sorted(len(row["answer"].split(" ")) for row in rows)
    assert counts[0] >= 1
    assert counts[-1] == 60
    assert abs(statistics.median(counts) - 8) <= 1
    # The mean of a log-normal exceeds its median by exp(sigma**2 / 2); the cut takes a little back.
    assert 1.2 < statistics.mean(counts) / 8 < 1.4


@given(st.integers(min_value=2, max_value=60), st.data())
def test_counting_reward_is_the_share_of_the_right_prefix(n: int, data: st.DataObject) -> None:
    answer = counting.row(n)["answer"]
    assert counting.reward(answer, answer) == 1.0
    assert counting.reward(f"{answer} {n + 1}", answer) == pytest.approx(n / (n + 1))
    wrong = data.draw(st.integers(min_value=0, max_value=n - 1))
    said = answer.split(" ")
    said[wrong] = "x"
    assert counting.reward(" ".join(said), answer) == pytest.approx(wrong / n)
    assert counting.reward("", answer) == 0.0


def test_counting_holds_out_some_of_every_length() -> None:
    assert counting.every(20) == [counting.row(20), counting.row(40), counting.row(60)]


def test_counting_refuses_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="expected"):
        counting.rows(count=0)
    with pytest.raises(ValueError, match="expected"):
        counting.every(0)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("3*4=12\n#### 12", 1.0),
        ("#### 11 no, wait\n#### 12", 1.0),
        ("####12.00", 1.0),
        ("#### **$12.**", 1.0),
        ("#### -12", 0.0),
        ("#### 123", 0.0),
        ("12", 0.0),
        ("#### twelve, that is 12", 0.0),
        ("#### 12\n####", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_reward_is_for_the_number_behind_the_last_mark(completion: str, reward: float) -> None:
    assert gsm8k.reward(completion, "It is <<3*4=12>>12 eggs.\n#### 12") == reward


@given(st.integers(-(10**9), 10**9))
def test_gsm8k_results_are_compared_by_value(number: int) -> None:
    assert gsm8k.reward(f"#### {number:,}", f"worked out\n#### {number}") == 1.0
    assert gsm8k.reward(f"#### {number + 1}", f"worked out\n#### {number:,}") == 0.0


def test_a_gsm8k_row_without_a_result_is_an_error_and_never_a_reward() -> None:
    with pytest.raises(ValueError, match="#### and a number"):
        gsm8k.reward("#### 3", "three")


def test_chain_sum_works_through_the_library_s_own_questions() -> None:
    rows = chain_sum.rows(count=200, seed=2, min_terms=2, max_terms=4, min_digits=1, max_digits=2)
    library = reasoning_gym.create_dataset(
        "chain_sum", size=200, seed=2, min_terms=2, max_terms=4, min_digits=1, max_digits=2
    )
    for mine, entry in zip(rows, library, strict=True):
        assert mine["question"] in entry["question"]
        assert mine["answer"] == entry["answer"]
        working, _, final = mine["solution"].partition(chain_sum.MARK)
        assert final == entry["answer"]
        for step in working.split(","):
            left, right = step.split("=")
            a, sign, b = re.fullmatch(r"(-?\d+)([+-])(\d+)", left).groups()  # type: ignore[union-attr]
            assert int(right) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert last_number(mine["solution"], mine["answer"]) == 1.0
    assert rows[0]["answer"] != chain_sum.rows(count=1, seed=3)[0]["answer"]


def test_a_calculator_that_is_asked_in_every_turn_earns_nothing_rather_than_no_reward() -> None:
    game = calculator.Calculator()
    game.reset(calculator.rows(count=1)[0])
    for _ in range(2):
        step = as_step(game.step({"role": "assistant", "content": "[37*48]"}))
        assert (step.done, step.reward) == (False, 0.0)
        assert step.messages[0]["content"] == "=1776#"


def test_a_calculator_row_played_as_its_solution_shows_earns_the_reward() -> None:
    rows = calculator.rows(digits=2, count=200, seed=1)
    assert len({row["question"] for row in rows}) == len(rows) == 200
    for row in rows:
        call, rest = row["solution"][: row["solution"].index("]") + 1], row["solution"].partition("#")[2]
        game = calculator.Calculator()
        game.reset(row)
        observation = game.step({"role": "assistant", "content": call})["observation"]
        assert f"{call}{observation}{rest}" == row["solution"]
        assert game.step({"role": "assistant", "content": rest}) == {"done": True, "reward": 1.0}
        assert game.step({"role": "assistant", "content": f"{rest}0"}) == {"done": True, "reward": 0.0}


@pytest.mark.parametrize("text", ["", "12", "[1*2", "[1/2]", "[1*2] ", "[1*2][", "[1234567*1]"])
def test_what_is_no_call_is_not_calculated(text: str) -> None:
    assert calculator.calculate(text) is None


@pytest.mark.parametrize(("digits", "count"), [(0, 5), (1, 0), (1, 51)])
def test_a_calculator_refuses_impossible_sizes(digits: int, count: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        calculator.rows(digits=digits, count=count)


@given(st.integers(min_value=2, max_value=80), st.integers(min_value=0, max_value=99))
def test_games_are_won_by_guesses_that_fit_what_was_answered(span: int, seed: int) -> None:
    for row in guessing.rows(span=span, count=5, seed=seed):
        low, high = map(int, row["question"].removesuffix(":").split("-"))
        assert high - low + 1 == span
        *turns, last = row["solution"].split("?")
        assert last == ""
        guess = 0
        for turn in turns:
            if turn[0] in "<>":
                low, high = (guess + 1, high) if turn[0] == ">" else (low, guess - 1)
            guess = int(turn.lstrip("<>"))
            assert low <= guess <= high
        assert guess == row["secret"]


async def played(words: list[str], **args: object) -> tuple[list[object], dict[str, object]]:
    game = guessing.GuessingGame(**args)  # type: ignore[arg-type]
    game.reset({"secret": 22})
    said = [await game.step({"role": "assistant", "content": word}) for word in words]
    return said, game.finish("stop")


async def test_a_game_is_worth_more_the_earlier_it_is_won() -> None:
    assert await played(["22?"]) == (
        [{"done": True}],
        {"reward": 1.0, "metrics": {"guesses": 1, "found": True}},
    )
    said, end = await played(["10?", "x", "30?", "22?"], tries=4, delay_s=[0.0, 0.0])
    assert (said, end["reward"]) == ([">", "!", "<", {"done": True}], 0.25)
    said, end = await played(["10?", "11?"], tries=2)
    assert (said, end["reward"]) == ([">", {"done": True}], 0.0)
    assert (await played(["10?"]))[1]["reward"] == 0.0, "one that a budget cut off"


def test_guessing_refuses_what_is_out_of_range() -> None:
    for span, count in ((1, 1), (81, 1), (20, 0)):
        with pytest.raises(ValueError, match="expected"):
            guessing.rows(span=span, count=count)
    for delay_s in ([1.0], [2.0, 1.0], [-1.0, 1.0]):
        with pytest.raises(ValueError, match="expected"):
            guessing.GuessingGame(delay_s=delay_s)
