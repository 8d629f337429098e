"""Display of an interrupt."""

import sys
import types

import pytest

from conformance.pytest_plugin.interruption import BriefInterrupt


def interrupted(*, has_line: bool) -> pytest.ExceptionInfo[BaseException]:
    """Return an interrupt one call further down, at a place whose line the interpreter knows or does not know."""
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    if sys.gettrace():
        pytest.skip("traced code, such as under coverage, has a table of lines in which nothing is without one")
    error, tb = caught.value, caught.tb
    nowhere = types.TracebackType(None, tb.tb_frame, 10**6, -1)
    assert nowhere.tb_lineno is None
    last = None if has_line else nowhere
    return pytest.ExceptionInfo.from_exception(error.with_traceback(_chain(tb, tb, last)))


def _chain(first: types.TracebackType, second: types.TracebackType, last: object) -> types.TracebackType:
    assert last is None or isinstance(last, types.TracebackType)
    end = types.TracebackType(last, second.tb_frame, second.tb_lasti, second.tb_lineno)
    return types.TracebackType(end, first.tb_frame, first.tb_lasti, first.tb_lineno)


@pytest.mark.parametrize("has_line", [True, False])
def test_brief_interrupt_keeps_the_last_entry(has_line: bool) -> None:
    excinfo = interrupted(has_line=has_line)
    BriefInterrupt(full=False).pytest_keyboard_interrupt(excinfo)
    assert [entry.name for entry in excinfo.traceback] == ["interrupted"]
    assert "1 / 0" in str(excinfo.getrepr(funcargs=True))


def test_full_trace_keeps_all_entries_that_have_a_line() -> None:
    excinfo = interrupted(has_line=False)
    assert len(excinfo.traceback) == 3
    BriefInterrupt(full=True).pytest_keyboard_interrupt(excinfo)
    assert len(excinfo.traceback) == 2
    assert "1 / 0" in str(excinfo.getrepr(funcargs=True))


def test_pytest_cannot_render_an_entry_without_a_line() -> None:
    """The filter can be removed once pytest renders such a traceback."""
    with pytest.raises(TypeError):
        interrupted(has_line=False).getrepr(funcargs=True)
