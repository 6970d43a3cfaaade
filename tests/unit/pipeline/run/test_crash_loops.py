"""A role that exits again and again is reported once for each cause, and so is the end of the loop."""

from rollstream.pipeline.run.crash_loops import LoopWatch
from rollstream.pipeline.run.supervisor import CrashLoop


def loop(cause: str, exits: int = 4) -> CrashLoop:
    return CrashLoop(exits=exits, cause=cause, again_in_s=60.0)


def test_a_loop_is_told_once_for_each_cause_and_so_is_its_end() -> None:
    watch = LoopWatch("main")
    assert watch.look({}) == []
    (line,) = watch.look({"env-1": loop("exited with code 2: no server")})
    assert "role env-1 exited with code 2: no server; run main continues without this role" in line
    assert "in 60 s" in line
    assert watch.look({"env-1": loop("exited with code 2: no server", exits=5)}) == []
    assert len(watch.look({"env-1": loop("exited with signal SIGKILL")})) == 1
    assert watch.look({}) == ["role env-1 has recovered"]
    assert watch.look({}) == []
