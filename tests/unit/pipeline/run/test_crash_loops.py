"""A role that exits again and again is reported once for each cause, and so is the end of the loop."""

import math

from rollstream.pipeline.run.crash_loops import CrashLoop, LoopWatch


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


def test_a_role_that_gave_way_to_another_process_is_said_not_to_be_started_again() -> None:
    fenced = CrashLoop(exits=1, cause="gave way to another process", again_in_s=math.inf)
    (line,) = LoopWatch("main").look({"group-1": fenced})
    assert line.endswith("continues without this role, which is not started again")
