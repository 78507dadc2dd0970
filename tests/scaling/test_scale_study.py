"""Planning of studies: options, points and their batches, order of runs, placement, one job per point."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from launch_runs import clean_env, scheduler
from made_up_runs import make_run
from msgspec.structs import replace
from scale_runs import TRAIN, scale
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import RunDir, append_line, write_json
from ezpz_llm.core.rundir.records import update_record
from ezpz_llm.launcher.jobs.option_parsing import remove_options, value_of
from ezpz_llm.verify.scaling import study_runs
from ezpz_llm.verify.scaling.estimate import estimate
from ezpz_llm.verify.scaling.measurement import measure, untraced_steps
from ezpz_llm.verify.scaling.options import parse
from ezpz_llm.verify.scaling.planning import MEASURING, find_sizes, plan_study
from ezpz_llm.verify.scaling.study import (
    SPLIT,
    Point,
    Repeat,
    Study,
    add_repeat,
    nodes_of_repeat,
    points_file,
    read_repeats,
    read_study,
    run_dir_of,
    study_file,
)
from ezpz_llm.verify.scaling.study_runs import remaining_runs

PLAIN = "python3 -m ezpz_llm.train"
ENV = clean_env()


def plan(folder: Path, options: str, *command: str) -> Study:
    return plan_study(parse([*options.split(), "--", *(command or TRAIN)]), ENV, folder, ())


def batches(study: Study) -> dict[str, tuple[int, int, int]]:
    return {point.name: (point.global_batch, point.micro_batch, point.accumulation) for point in study.points}


def point(name: str = "weak-ddp-n1", **changes: object) -> Point:
    return replace(Point(name, "weak", "ddp", 1, 1, 4, 4, 1, ("-n", "1"), TRAIN), **changes)


def study(*points: Point, **changes: object) -> Study:
    return replace(Study("nodes", 3, 0, (), "/", None, 1, points or (point(),)), **changes)


def repeat(**changes: object) -> Repeat:
    return replace(Repeat("weak-ddp-n1", "weak", "ddp", 1, 1, 0, 4, 4, 1, "points/weak-ddp-n1/run-0", 32,
                          (0.1, 0.2), 900.0, None, None, 5000, dict.fromkeys(SPLIT, 0.02), 0, "vm", 5.5, 4.0),
                   **changes)


def test_read_and_remove_options_of_a_command() -> None:
    command = ("train", "--lr", "1", "--steps=5", "--lr=2", "-x", "--steps-more", "7")
    assert (value_of(command, "--lr"), value_of(command, "--steps"), value_of(command, "--st")) == ("2", "5", None)
    assert remove_options(command, "--lr", "--steps") == ("train", "-x", "--steps-more", "7")


@pytest.mark.parametrize(("options", "message"), [
    (f"-- {PLAIN}", "a study requires sizes"),
    (f"--nodes 1,2 --ranks 1 -- {PLAIN}", "both in nodes and in ranks"),
    (f"--nodes 1,2,2 -- {PLAIN}", "each once"),
    (f"--nodes 0 -- {PLAIN}", "whole numbers"),
    (f"--nodes 1,2 --mode medium -- {PLAIN}", "weak, strong, both"),
    (f"--node 1,2 -- {PLAIN}", "--nodes"),
    ("--nodes 1,2", "no training command"),
    ("--nodes 1,2 --ds-config ddp -- python3 train.py", "--ds-config does not apply to your own script"),
    ("--nodes 1,2 --mode both -- launch python3 train.py", "your own script supports only weak scaling"),
    ("--nodes 2 --what layouts -- ./train", "your own script has one layout"),
    ("--nodes 1,2 -- launch python3 -m ezpz_llm.test_dist", "a study runs ezpz_llm.train"),
    (f"--nodes 1,2 -- launch -n 4 {PLAIN}", "launch -n"),
    (f"--nodes 1,2 -- launch --nodes 4 {PLAIN}", "launch --nodes"),
    (f"--nodes 1,2 -- {PLAIN} --run-dir x", "--run-dir is not supported in a study"),
    (f"--nodes 1,2 -- {PLAIN} --resume x", "--resume is not supported in a study"),
    (f"--nodes 1,2 --ds-config ddp -- {PLAIN} --ds-config zero1", "set twice"),
    (f"--nodes 1,2 --what layouts -- {PLAIN}", "at one size"),
    (f"--nodes 2 --what layouts --mode weak -- {PLAIN}", "the same global batch"),
    ("--study x --repeats 5", "cannot change"),
])
def test_invalid_options(options: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(options.split())
    assert message in str(raised.value)


@pytest.mark.parametrize(("options", "instead"), [
    (("--steps", "12", "--trace-steps", "2"), "--steps 14 or more"),
    (("--steps", "3", "--trace-steps", "0"), None), (("--steps", "2", "--trace-steps", "0"), "--steps 3 or more")])
def test_too_few_steps_are_rejected_before_the_first_run(tmp_path: Path, options: tuple[str, ...],
                                                         instead: str | None) -> None:
    if instead is None:
        assert plan(tmp_path, "--ranks 1", *TRAIN, *options).points
        return
    with pytest.raises(UserError) as raised:
        plan(tmp_path, "--ranks 1", *TRAIN, *options)
    assert raised.value.instead == instead


@pytest.mark.parametrize(("code", "runs"), [(0, 1), (2, 1), (1, 3)])
def test_a_failure_that_all_runs_share_stops_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     code: int, runs: int) -> None:
    planned, started = study(), []

    def fail(study: Study, folder: Path, point: Point, number: int, _: tuple[str, ...]) -> Repeat:
        started.append(number)
        update_record(run_dir_of(folder, point, number).create(), exit={"code": code, "cause": "", "ended": 1.0})
        return repeat(repeat=number, error="1 steady steps")

    monkeypatch.setattr(study_runs, "_run_repeat", fail)
    with suppress(study_runs.StudyInterrupted):
        study_runs.run_all(planned, tmp_path, [(planned.points[0], number) for number in range(3)])
    assert len(started) == runs


def test_launch_options_are_separated_from_command() -> None:
    options = parse(["--nodes", "1,2", "--", "launch", "--launcher", "srun", "--hosts", "n[1-4]", "--", "python3",
                     "-m", "ezpz_llm.train", "--lr", "1"])
    assert (options.launch_words, options.hosts) == (("--launcher", "srun"), "n[1-4]")
    assert options.command == ("python3", "-m", "ezpz_llm.train", "--lr", "1")


@pytest.mark.full
def test_weak_keeps_rank_batch_and_strong_keeps_global_batch(tmp_path: Path) -> None:
    planned = plan(tmp_path, "--ranks 2,1 --mode both --ds-config ddp", *TRAIN, "--micro-batch-size", "2",
                   "--gradient-accumulation-steps", "3")
    assert batches(planned) == {"weak-ddp-r1": (6, 2, 3), "weak-ddp-r2": (12, 2, 3),
                                "strong-ddp-r1": (12, 2, 6), "strong-ddp-r2": (12, 2, 3)}
    assert "strong: the global batch is 12 sequences, the default of 2 ranks" in planned.notes[0]
    # Strong scaling keeps the global batch; weak scaling keeps a rank's part of it at the smallest size.
    planned = plan(tmp_path, "--ranks 2,4 --mode both --ds-config ddp,tp2", *TRAIN, "--global-batch-size", "16")
    assert batches(planned) == {
        "weak-ddp-r2": (16, 4, 2), "weak-ddp-r4": (32, 4, 2), "weak-tp2-r2": (16, 4, 4), "weak-tp2-r4": (32, 4, 4),
        "strong-ddp-r2": (16, 4, 2), "strong-ddp-r4": (16, 4, 1), "strong-tp2-r2": (16, 4, 4),
        "strong-tp2-r4": (16, 4, 2)}
    for entry in planned.points:
        assert value_of(entry.command, "--ds-config") == entry.ds_config
        assert value_of(entry.launch, "-n") == str(entry.ranks)
        typed = ("--eval-tokens",)
        assert all(value_of(entry.command, name) == value for name, value in MEASURING.items() if name not in typed)
        assert value_of(entry.command, "--eval-tokens") == "512"


def test_all_sizes_have_the_layout_of_the_largest(tmp_path: Path) -> None:
    """The trainer's default layout of a single rank differs."""
    both = plan(tmp_path, "--ranks 1,2").points
    assert [(entry.name, value_of(entry.command, "--ds-config")) for entry in both] == [
        ("weak-zero1-r1", "zero1"), ("weak-zero1-r2", "zero1")]
    assert [entry.ds_config for entry in plan(tmp_path, "--ranks 1").points] == ["ddp"]


def test_user_script_has_one_point_per_size(tmp_path: Path) -> None:
    planned = plan(tmp_path, "--ranks 2,1", "python3", "my_net.py", "--lr", "1")
    assert batches(planned) == {"weak-my_net-r1": (1, 1, 1), "weak-my_net-r2": (2, 1, 1)}
    assert {entry.command for entry in planned.points} == {("python3", "my_net.py", "--lr", "1")}
    assert "one sequence" in planned.notes[0]


@pytest.mark.parametrize(("lines", "error"), [
    ([{"tokens_per_second": 2560.0}] * 12, None),
    ([{}] * 12, "its steps have neither tokens nor samples: call ezpz_llm.record("),
    ([], "0 steady steps, but a measurement needs 3: run more steps, and call ezpz_llm.record(")])
def test_batch_of_user_script_is_read_from_its_records(lines: list[dict], error: str | None,
                                                       tmp_path: Path) -> None:
    script = point("weak-mine-n1", ranks=4, command=("python3", "mine.py"))
    run_dir = RunDir(run_dir_of(tmp_path, script, 0).path).create()
    update_record(run_dir, exit={"code": 0, "cause": ""}, environment={"device": {"type": "cpu"}},
                  launch={"hosts": ["a"], "ranks_per_host": [4]})
    for step, line in enumerate(lines, 1):
        append_line(run_dir.metrics, {"step": step, "step_time_s": 0.1, "loss": 5 - step / 10, **line})
    measured = measure(tmp_path, script, 0)
    if error is None:
        assert (measured.error, measured.global_batch, measured.block_size, measured.tokens_per_second) == (
            None, 4, 64, 2560)
    else:
        assert error in measured.error


def test_point_that_cannot_run_is_rejected_before_start(tmp_path: Path) -> None:
    code, output = scale(tmp_path, "--ranks", "1,3", "--mode", "strong", "--", *TRAIN, "--global-batch-size", "8")
    assert code == 2
    assert "error: the command on 3 ranks cannot run: a global batch of 8 sequences is not" in output
    assert "instead: a global batch of 6 or 9" in output
    code, output = scale(tmp_path, "--ranks", "2", "--ds-config", "ddp,tp3", "--", *TRAIN)
    assert (code, "tp3" in output, "Traceback" in output) == (2, True, False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="a strong-scaling study computes the accumulation steps itself"):
        plan(tmp_path, "--ranks 1 --mode strong", *TRAIN, "--global-batch-size", "8",
             "--gradient-accumulation-steps", "2")
    with pytest.raises(UserError, match="secret"):
        plan(tmp_path, "--ranks 1", "launch", "--wrap", "env API_KEY=abcdefgh123", *TRAIN)


@pytest.mark.full
def test_layouts_that_can_run_are_compared_at_one_global_batch(tmp_path: Path) -> None:
    planned = plan(tmp_path, "--ranks 3 --what layouts")
    assert [(entry.mode, entry.name) for entry in planned.points] == [
        ("strong", f"strong-{name}-r3") for name in ("ddp", "zero1", "zero2", "zero3")]
    assert {entry.global_batch for entry in planned.points} == {12}
    assert [note.partition(":")[0] for note in planned.notes] == ["omitted", "omitted", "strong"]
    with pytest.raises(UserError, match="tp2"):
        plan(tmp_path, "--ranks 3 --what layouts --ds-config ddp,tp2")
    with pytest.raises(UserError, match="a comparison requires two layouts"):
        plan(tmp_path, "--ranks 2 --what layouts", *TRAIN, "--ds-config", "zero1")


def test_sizes_set_ranks_and_threads_explicitly(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("n1 slots=2\nn2 slots=2\nn3 slots=2\n")
    command = ("launch", "--hostfile", str(hosts), "--launcher", "mpiexec", *PLAIN.split())
    sizes = find_sizes(parse(["--nodes", "2,1", "--", *command]), ENV)
    assert [(size.label, size.ranks) for size in sizes] == [("n1", 2), ("n2", 4)]
    assert [size.launch[-4:] for size in sizes] == [("-n", "2", "--ppn", "2"), ("-n", "4", "--ppn", "2")]
    # A study uses the threads of the largest size at all sizes.
    assert {size.threads for size in find_sizes(parse(["--ranks", "1,2", "--", *PLAIN.split()]), ENV)} == {
        len(os.sched_getaffinity(0)), len(os.sched_getaffinity(0)) // 2}
    assert plan(tmp_path, "--ranks 1,2").threads == len(os.sched_getaffinity(0)) // 2
    with pytest.raises(UserError, match="a point requires 4 nodes, but there are 3: n1, n2, n3"):
        find_sizes(parse(["--nodes", "1,4", "--", *command]), ENV)
    with pytest.raises(UserError, match="this process is already a rank"):
        find_sizes(parse(["--ranks", "1", "--", *PLAIN.split()]), ENV | {"RANK": "0", "WORLD_SIZE": "2",
                                                                        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                                                                        "TORCHELASTIC_RUN_ID": "x"})


def test_each_round_has_all_points_in_random_order() -> None:
    points = [point(f"weak-ddp-n{nodes}", nodes=nodes) for nodes in (1, 2, 4, 8)]
    runs = study(*points, repeats=6, seed=1).order()
    rounds = [[entry.name for entry, number in runs if number == round_] for round_ in range(6)]
    assert [number for _, number in runs] == sorted(number for _, number in runs)
    assert {tuple(sorted(names)) for names in rounds} == {tuple(sorted(entry.name for entry in points))}
    assert len({tuple(names) for names in rounds}) > 3
    assert runs == study(*points, repeats=6, seed=1).order() != study(*points, repeats=6, seed=2).order()


def test_repeats_of_a_point_use_different_nodes() -> None:
    hosts = ["n1", "n2", "n3", "n4"]
    assert [nodes_of_repeat(hosts, 1, number) for number in range(5)] == [
        ("n1",), ("n2",), ("n3",), ("n4",), ("n1",)]
    assert [nodes_of_repeat(hosts, 2, number) for number in range(3)] == [("n1", "n2"), ("n3", "n4"), ("n1", "n2")]
    assert [nodes_of_repeat(hosts, 3, number) for number in range(2)] == [("n1", "n2", "n3"), ("n4", "n1", "n2")]
    assert {nodes_of_repeat(hosts, 4, number) for number in range(3)} == {tuple(hosts)}


def test_study_and_repeats_round_trip(tmp_path: Path) -> None:
    definition = study(point(), point("weak-ddp-n2", nodes=2), notes=("a note",))
    definition.write(tmp_path)
    assert read_study(tmp_path) == definition
    write_json(study_file(tmp_path), {**json.loads(study_file(tmp_path).read_text()), "of_an_older_version": 1})
    assert read_study(tmp_path) == definition
    first, second = repeat(), repeat(repeat=1, error="it broke", tokens_per_second=None, step_times_s=())
    add_repeat(tmp_path, first)
    add_repeat(tmp_path, second)
    assert read_repeats(tmp_path) == [first, second]
    remaining = remaining_runs(definition, tmp_path, ["weak-ddp-n1"], False)
    assert [(remaining_point.name, number) for remaining_point, number in remaining] == [("weak-ddp-n1", 2)]
    assert len(remaining_runs(definition, tmp_path, [], True)) == 5
    again = replace(second, error=None, tokens_per_second=5.0)
    add_repeat(tmp_path, again)
    assert read_repeats(tmp_path) == [first, again]
    with points_file(tmp_path).open("a") as file:
        file.write('{"point": "x"}\n')
    with pytest.raises(UserError, match="after 2 runs"):
        read_repeats(tmp_path)
    for text, message in ((None, "no study.json"), ('{"version": 0}', "another version"), ("[]", "another version"),
                          ('{"version": 1}', "unit is missing"),
                          ('{"version": 1, "points": [{}]}', r"points\[0\].name is missing")):
        study_file(tmp_path).unlink(missing_ok=True)
        if text:
            study_file(tmp_path).write_text(text)
        with pytest.raises(UserError, match=message):
            read_study(tmp_path)


def _stored(folder: Path, *path: str | int, value: object) -> None:
    """Write a study with one member of study.json replaced."""
    study(point(), point("weak-ddp-n2", nodes=2), repeats=1000).write(folder)
    stored = member = json.loads(study_file(folder).read_text())
    for name in path[:-1]:
        member = member[name]
    member[path[-1]] = value
    write_json(study_file(folder), stored)


@pytest.mark.parametrize(("path", "value", "message"), [
    (("points", 0, "name"), "../../../me/run", r"points\[0\].name is '../../../me/run', but must be a plain file"),
    (("points", 0, "name"), "/tmp/x", "must be a plain file name, without directories"),
    (("points", 0, "name"), "..", "must be a plain file name"),
    (("points", 0, "name"), "a\x1b]0;b", "must be a plain file name"),
    (("points", 0, "name"), "weak-ddp-n2", "two points have the same name"),
    (("repeats",), 10**12, "repeats is 1000000000000, but must be 1,000 or less"),
    (("repeats",), 0, "repeats is 0, but must be 1 or more"),
    (("points", 0, "ranks"), 0, r"points\[0\].ranks is 0, but must be 1 or more"),
    (("points", 0, "nodes"), 10**9, "must be 200,000 or less"),
    (("threads",), 10**12, "threads is 1000000000000, but must be 1,000,000,000 or less"),
    (("points",), [], "points is a list, but must be of length 1 or more"),
    (("points",), [{**as_plain(point()), "name": f"p{number}"} for number in range(101)],
     "101 points x 1000 repeats are more than 100,000 runs")])
def test_invalid_values_of_a_study_are_rejected(tmp_path: Path, path: tuple, value: object, message: str) -> None:
    _stored(tmp_path, *path, value=value)
    with pytest.raises(UserError, match=message):
        read_study(tmp_path)


@pytest.mark.parametrize(("member", "value", "message"), [
    ("run_dir", "../../me/run", "run_dir is '../../me/run', but must be a path in the same folder"),
    ("run_dir", "/etc", "must be a path in the same folder"),
    ("run_dir", "points/..", "must be a path in the same folder"),
    ("point", "a/b", "point is 'a/b', but must be a plain file name"),
    ("ranks", 0, "ranks is 0, but must be 1 or more"),
    ("split", {"compute": 0.1}, "the step-time breakdown is incomplete"),
    ("split", dict.fromkeys(SPLIT, 0), "the step-time breakdown is incomplete"),
    ("step_times_s", [0.1, 0.0], r"step_times_s\[1\] is 0.0, but must be 1e-07 or more"),
    ("step_times_s", [float("nan")], "step_times_s"),
    ("tokens_per_second", 10**400, "tokens_per_second is inf"),
    ("block_size", 0, "block_size is missing"),
    ("repeat", 10**6, "repeat is 1000000")])
def test_invalid_values_of_a_repeat_are_rejected(tmp_path: Path, member: str, value: object, message: str) -> None:
    append_line(points_file(tmp_path), {**as_plain(repeat()), member: value})
    with pytest.raises(UserError, match=message):
        read_repeats(tmp_path)


@pytest.mark.parametrize("others", ["study.json", "folder", "link"])
def test_commands_of_a_study_that_others_can_write_are_not_run(tmp_path: Path, others: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    study(replace(point(), command=("touch", str(tmp_path / "made"))), directory=str(tmp_path)).write(folder)
    if others == "link":
        study_file(folder).rename(tmp_path / "real.json")
        (tmp_path / "real.json").chmod(0o666)
        study_file(folder).symlink_to(tmp_path / "real.json")
    else:
        (study_file(folder) if others == "study.json" else folder).chmod(0o777)
    code, output = scale(tmp_path, "--study", "theirs")
    assert code == 2
    assert "another user owns this study or can write it, and --study would run its commands" in output
    assert "ezpz_llm.scale report" in output or "ezpz-llm scale report" in output
    assert not (tmp_path / "made").exists()
    assert not (folder / "points").exists()


def test_texts_of_a_study_are_escaped(tmp_path: Path) -> None:
    study(notes=("\x1b]0;owned\x07\x1b[8mhidden", ), typed=("\x1b[2J",)).write(tmp_path)
    add_repeat(tmp_path, repeat(error="it \x1b[2J\x9bbroke", tokens_per_second=None, step_times_s=()))
    for words in (("--study", str(tmp_path), "--dry-run"), ("report", str(tmp_path))):
        _, output = scale(tmp_path, *words)
        assert "owned" in output or "broke" in output
        assert not {"\x1b", "\x07", "\x9b"} & set(output)


def test_read_only_study_gives_a_message(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "points.jsonl").mkdir()  # root may write any file
    else:
        (tmp_path / "points.jsonl").touch(0o444)
    with pytest.raises(UserError, match=r"cannot write points.jsonl: "):
        add_repeat(tmp_path, repeat())


@pytest.mark.parametrize(("record", "error"), [
    ({"exit": {"code": 1, "cause": "rank 1 on vm: ValueError"}}, "rank 1 on vm: ValueError (code 1)"),
    ({"exit": {"code": 0, "cause": "all ranks ended with 0"}}, "0 steady steps, but a measurement needs 3"),
    ({"exit": {"code": 1, "cause": "a bad loss"}, "stopped": "ten bad steps"}, "a bad loss (code 1)"),
    ({"exit": {"code": 124, "cause": "idle", "stopped": {"kind": "idle"}}}, "idle (code 124)"),
    ({"exit": {"code": 0, "cause": ""}, "stopped": "the reservation ends"}, None),
    ({"exit": {"code": 143, "cause": "SIGTERM", "stopped": {"kind": "signal"}}}, None),
    ({"exit": None}, None),
    ({}, None),
])
def test_failed_runs_are_measured_and_interrupted_runs_are_not(record: dict, error: str | None,
                                                               tmp_path: Path) -> None:
    run_dir = RunDir(run_dir_of(tmp_path, point(), 0).path).create()
    update_record(run_dir, **record)
    measured = measure(tmp_path, point(), 0)
    if error is None:
        assert measured is None
    else:
        assert error in measured.error
        assert (measured.step_times_s, measured.tokens_per_second) == ((), None)
        assert measured.run_dir == "points/weak-ddp-n1/run-0"


@pytest.mark.parametrize(("mfus", "mfu"), [((0.4,) * 12, 0.4), ((0.4,) * 8 + (None,) * 4, 0.4),
                                          ((None,) * 9 + (0.98,) * 3, math.inf), ((None,) * 12, None)])
def test_impossible_mfu_is_an_error(mfus: tuple[float | None, ...], mfu: float | None, tmp_path: Path) -> None:
    """The trainer omits an MFU above 1, so the median of the remaining steps would look plausible."""
    run_dir = RunDir(run_dir_of(tmp_path, point(), 0).path).create()
    update_record(run_dir, exit={"code": 0, "cause": ""}, model={"block_size": 8},
                  memory={"host_peak": 1, "peak": 1}, environment={"device": {"type": "cpu"}},
                  launch={"hosts": ["a"], "ranks_per_host": [1]})
    write_json(run_dir.layout, {"batch": {"global_batch": 4, "micro_batch": 4, "accumulation": 1, "dp_size": 1}})
    for step, value in enumerate((mfus[0], *mfus, mfus[0]), 1):
        append_line(run_dir.metrics, {"step": step, "step_time_s": 0.1, "loss": 5 - step / 10,
                                      **({} if value is None else {"mfu": value})})
    measured = measure(tmp_path, point(), 0)
    if mfu == math.inf:
        assert "an MFU above 100 %, which is impossible" in measured.error
    else:
        assert (measured.error, measured.mfu) == (None, mfu)


def test_step_times_exclude_traced_steps(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).create()
    rows = [{"step": step} for step in range(1, 21)]
    assert [row["step"] for row in untraced_steps(rows, run_dir)] == list(range(3, 20))
    for rank in (0, 1):
        run_dir.trace(rank).write_bytes(gzip.compress(b'{"name": "step 7"} {"name": "step 8"} {"name": "step 9"}'))
    assert [row["step"] for row in untraced_steps(rows, run_dir)] == list(range(12, 20))


def test_dry_run_prints_points_and_writes_nothing(tmp_path: Path) -> None:
    code, output = scale(tmp_path, "--ranks", "1,2", "--repeats", "2", "--study", "s", "--dry-run", "--", *TRAIN)
    assert code == 0, output
    assert "2 points x 2, 4 left to run" in output
    assert "2 ranks" in output
    assert "estimate   unknown: no run of this model in runs/" in output
    assert not (tmp_path / "s").exists()
    code, output = scale(tmp_path, "reprot", "s")
    assert (code, "ezpz-llm scale report D" in output) == (2, True)


def test_estimate_uses_runs_of_the_study_or_of_the_same_model(tmp_path: Path) -> None:
    command = ("python3", "-m", "ezpz_llm.train", "--model", "tiny-gpt2", "--steps", "60")
    points = [point(f"weak-ddp-n{nodes}", nodes=nodes, ranks=2 * nodes, global_batch=8 * nodes, command=command)
              for nodes in (1, 4)]
    planned, runs = study(*points, repeats=2), [(entry, number) for number in (0, 1) for entry in points]

    def estimated(**changes: bool) -> str:
        return estimate(planned, tmp_path / "s", runs, tmp_path / "runs", **{"in_jobs": False, **changes})

    assert estimated().endswith("/runs/. Start one point first: --point weak-ddp-n1")
    make_run(tmp_path / "runs/other", launch={"typed": ["launch", *command, "--n-layer", "3"]},
             model={"block_size": 64})
    assert estimated().startswith("unknown"), "another model"
    # 10,240 tokens/s and 4 sequences of 64 tokens per rank: 60 steps take 1.5 s, after a startup of 18.5 s.
    make_run(tmp_path / "runs/same", launch={"typed": ["launch", "-n", "2", *command]}, model={"block_size": 64},
             startup={"total_s": 18.5})
    assert estimated() == "0:01:20 in total, 0.0889 node-hours (perfect scaling from runs/same)"
    assert "0.0556 node-hours" in estimated(in_jobs=True), "each job has only the nodes of its point"
    run_dir = run_dir_of(tmp_path / "s", points[0], 0).create()
    write_json(run_dir.record, {"launch": {"started": 100.0}, "exit": {"code": 0, "ended": 190.0}})
    assert estimated() == "0:06:00 in total, 0.4 node-hours (from 1 run of this study)"


@pytest.mark.full
def test_submit_queues_one_job_per_point(tmp_path: Path) -> None:
    bin_ = scheduler(tmp_path / "bin", "sbatch", "echo 7")
    path = f"{bin_}{os.pathsep}{ENV['PATH']}"
    options = ("--nodes", "1,2", "--repeats", "2", "--study", "s", "--submit", "--time 1:00:00", "--",
               "launch", "--ppn", "1", *TRAIN)
    code, output = scale(tmp_path, *options, PATH=path)
    assert code == 0, output
    jobs = [tmp_path / "s/points" / name / "job/job.sh" for name in ("weak-zero1-n1", "weak-zero1-n2")]
    assert (bin_ / "calls").read_text().split() == ["--parsable", str(jobs[0]), "--parsable", str(jobs[1])]
    assert "#SBATCH --nodes=2" in jobs[1].read_text()
    command = f"command=(ezpz-llm scale --study {tmp_path}/s --point weak-zero1-n2)"
    assert command in " ".join(jobs[1].read_text().split())
    # The job's command fails here because it requires two nodes.
    command = ["ezpz-llm", "scale", "--study", str(tmp_path / "s"), "--point", "weak-zero1-n2"]
    process = subprocess.run(command, env=ENV, cwd="/", capture_output=True, text=True,
                             timeout=scaled(60), check=False)
    assert process.returncode == 2
    assert "point weak-zero1-n2 requires 2 nodes, but there are 1" in process.stderr
    assert read_study(tmp_path / "s").points[1].launch == ("-n", "2", "--ppn", "1")
    with pytest.raises(UserError, match="--ranks one allocation"):
        plan(tmp_path, "--ranks 1,2 --submit --time=1h")
