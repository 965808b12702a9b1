"""Environments of other projects behind one face: what the worker calls, whatever the user wrote.

Invariant: an adapter is plain sync code; a user's function is called outside of any event loop, and what it
returns is awaited where it has to be, so that users' sync code may run loops of its own.
"""
