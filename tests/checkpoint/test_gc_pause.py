"""Whoever plans holds the garbage collector off, and it is as it was when the last of them is done."""

from __future__ import annotations

import gc

from headrace.checkpoint.gc_pause import gc_paused


def test_the_collector_is_on_again_only_if_it_was_on_and_when_all_are_done() -> None:
    first, second = gc_paused(), gc_paused()
    with first:
        assert not gc.isenabled()
        second.__enter__()
    assert not gc.isenabled(), "another thread still plans"
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled(), "the trainer collects by itself"
    finally:
        gc.enable()
