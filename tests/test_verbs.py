"""The command `tfdist VERB …`: what is typed, what each verb makes of it, and one message for each mistake."""

from __future__ import annotations

import pathlib
import re
import shlex
import socket
import subprocess

import pytest
import support

from tfdist import __version__, main
from tfdist.commands import launch, settings_list, verbs
from tfdist.errors import UserError
from tfdist.launch import own_host

DIGITS = "tfdist:experiments/digits.gin"


def test_alone_and_asked_it_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["help"]):
        assert verbs.run(arguments) == 0 and "verbs:" in capsys.readouterr().out
    assert verbs.run([]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", shown, re.MULTILINE) for name in verbs.VERBS)
    assert verbs.run(["--version"]) == 0
    assert capsys.readouterr().out == f"tfdist {__version__}\n"


@pytest.mark.parametrize("name", [name for name, verb in verbs.VERBS.items() if verb.mode])
def test_the_help_of_a_verb_has_its_own_flags_and_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        verbs.translate(name, ["--help"])
    shown = capsys.readouterr().out
    listed = set(re.findall(r"^  --(?:\[no\])?(\w+):", shown, re.MULTILINE))
    assert listed == set(verbs.list_flags(name))
    assert "Exit statuses:" in shown
    (example,) = re.findall(rf"^  tfdist {name} (.+)$", shown, re.MULTILINE)
    if verbs.VERBS[name].mode != "train" or name == "train":
        assert verbs.translate(name, example.split())  # it can be typed as it stands


@pytest.mark.parametrize(
    ("typed", "flags"),
    [
        (["train", "a.gin"], ["--mode=train", "--gin_file=a.gin"]),
        (["train", DIGITS, "train.epochs=3"], ["--mode=train", f"--gin_file={DIGITS}", "--gin_param=train.epochs=3"]),
        (["train", "a.gin", "--run_dir", "x"], ["--mode=train", "--gin_file=a.gin", "--run_dir=x"]),
        (["train", "--gin_file=a.gin", "b.gin"], ["--mode=train", "--gin_file=b.gin", "--gin_file=a.gin"]),
        (["sweep", "a.gin", "--verbose"], ["--mode=tune", "--gin_file=a.gin", "--verbose=True"]),
        (["find-rate", "a.gin"], ["--mode=find_rate", "--gin_file=a.gin"]),
        (["evaluate", "runs/a"], ["--mode=evaluate", "--run_dir=runs/a"]),
        (["predict", "runs/a", "predict.format='csv'"], None),
        (["evaluate", "runs/lr=0.1"], ["--mode=evaluate", "--run_dir=runs/lr=0.1"]),
        (["train", "runs/lr=0.1/best.gin"], ["--mode=train", "--gin_file=runs/lr=0.1/best.gin"]),
        (["plan", "a.gin", "--deadline=3"], ["--mode=plan", "--gin_file=a.gin", "--deadline=3.0"]),
        (["plan", "a.gin", "--devices=a", "--devices=b"], None),
    ],
)
def test_a_verb_is_a_mode_of_the_command(
    typed: list[str], flags: list[str] | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "lr=0.1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.gin").write_text("train.epochs = 3\n")
    (tmp_path / "runs" / name / "best.gin").touch()
    monkeypatch.chdir(tmp_path)
    translated = verbs.translate(typed[0], typed[1:])
    assert flags is None or translated == flags
    assert main.parse(translated).mode == verbs.VERBS[typed[0]].mode  # which reads what it is given


def test_a_run_resumes_with_its_own_configuration(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.gin").write_text("train.epochs = 3\n")
    translated = verbs.translate("resume", [str(tmp_path), "train.epochs=4"])
    assert translated == [
        *("--mode=train", f"--gin_file={tmp_path}/config.gin", "--gin_param=train.epochs=4", f"--run_dir={tmp_path}")
    ]


MISTAKES = [
    (["tran", "a.gin"], "There is no verb 'tran'.*Did you mean 'train'"),
    (["fit", "a.gin"], "There is no verb 'fit'; the verbs are train"),
    (["tune", "a.gin"], "Write: tfdist sweep"),
    (["a.gin"], "Write: tfdist train a.gin"),
    ([DIGITS], f"Write: tfdist train {DIGITS}"),
    (["train", "a"], "'a' is no gin file and no NAME=VALUE"),
    (["train", "a.gin", "train.epochs", "3"], "A setting is one word: train.epochs=3"),
    (["train", "a.gin", "train.epochs", "=", "3"], "A setting is one word: train.epochs=3"),
    (["train", "a.gin", "train.epochs"], "A setting is one word: train.epochs=VALUE"),
    (["train", "none.gin"], "there is no gin file 'none.gin'"),
    (["train", "tfdist:experiments/digit.gin"], "Did you mean 'experiments/digits.gin'"),
    (["train", "prose.gin"], "prose.gin:1: cannot read this.*Write NAME.PARAMETER = VALUE"),
    (["train", "script.gin"], "script.gin:2: cannot read the value keras"),
    (["train", "picture.gin"], "the gin file picture.gin cannot be read"),
    (["train"], "No experiment given"),
    (["train", "a.gin", "--epochs=3"], "Unknown command line flag 'epochs'.*A setting has no dashes: train.epochs=3"),
    (["train", "a.gin", "--mode=plan"], "--mode=plan is what the verb says"),
    (["train", "a.gin", "--devices=x"], "--devices is no flag of tfdist train. It belongs to: tfdist plan or prove"),
    (["plan", "a.gin", "--profile=steps 1-2"], "It belongs to: tfdist train or resume"),
    (["plan", "a.gin", "--deadline=soon"], "deadline"),
    (["evaluate", "a", "b"], "'b' is no gin file and no NAME=VALUE"),
    (["evaluate"], "No experiment given. Write --run_dir=DIR of a training"),
    (["evaluate", "/nowhere/at/all"], "holds no run"),
    (["resume"], "tfdist resume takes the directory of a run"),
    (["resume", "a.gin"], "tfdist resume takes the directory of a run"),
    (["train", "a.gin", "--log=xml"], "xml"),
    (["train", "a.gin", "--run_dir="], "--run_dir= is empty"),
    (["train", "a.gin", "--run_dir=a\nb"], "cannot be printed"),
    (["train", "a.gin", "--profile=now"], "profile"),
    (["settings", "train.epoch_s"], "No setting is called 'train.epoch_s'.*Did you mean 'train.epochs'"),
    (["env", "x"], "'x' belongs to no flag"),
    (["completion"], "Write: tfdist completion bash or zsh"),
    (["completion", "fish"], "Received 'fish'"),
    (["checkpoint"], "Write: tfdist checkpoint list RUN_DIR"),
    (["checkpoint", "lst", "x"], "Did you mean 'list'"),
    (["checkpoint", "list", "nowhere"], "There is no directory 'nowhere'"),
    (["checkpoint", "list", "runs", "--verfy"], r"verify \?"),
    (["checkpoint", "verify", "runs"], r"Write: tfdist checkpoint list RUN_DIR \[--verify\]"),
    (["report"], "No run given. Write, for example: tfdist report runs/digits"),
    (["report", "nowhere"], "'nowhere' holds no run: there is no run.json"),
    (["report", "s3://bucket/run"], "it takes local paths and gs://BUCKET/DIRECTORY"),
    (["report", "--list", "nowhere"], "There is no directory 'nowhere'"),
    (["report", "--list", "."], "There is no run in '.' or below"),
    (["report", "--list", "a", "b"], "--list takes one directory; received 'a b'"),
    (["doctor", "--largest_mib=-1"], "largest_mib"),
    (["doctor", "--peer_secs=3"], r"Did you mean: peer_seconds \?"),
    (["doctor", "--peer_seconds=0"], "above 0"),
    (["doctor", "--gin_file=nowhere.gin"], "no gin file 'nowhere.gin'"),
    (["new"], "One directory is to be written"),
    (["new", "x", "--data=pdf"], "pdf"),
    (["new", "x", "--example=mnist"], "should be one of <cifar10"),
    (["new", "x", "--example=cifar10", "--file=a.csv"], "--example=cifar10 takes no --file"),
]


@pytest.mark.parametrize(
    ("typed", "message"), MISTAKES, ids=lambda each: " ".join(each) if isinstance(each, list) else ""
)
def test_a_mistake_is_one_message(
    typed: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "config.gin").write_text("train.epochs = 3\n")
    (tmp_path / "prose.gin").write_text("Some words about digits.\n")
    (tmp_path / "script.gin").write_text("import keras\nmodel = keras.Sequential([])\nmodel.fit(x)\n")
    (tmp_path / "picture.gin").write_bytes(b"\x89PNG\r\n\x1a\n\0\xff")
    monkeypatch.chdir(tmp_path)
    assert verbs.run(typed) == 2
    shown = capsys.readouterr()
    assert re.search(message, " ".join(shown.err.split())), shown.err
    assert shown.err.count("error: ") == 1 and "Traceback" not in shown.err and not shown.out
    if (verb := find_advice(shown.err)) and verbs.VERBS[verb[0]].mode:
        assert verbs.translate(verb[0], verb[1:])  # what the message says can be typed


def find_advice(message: str) -> list[str]:
    """The words after `tfdist` in the command that ends a message; none where it has none, or one to be completed."""
    command = re.search(r"(?:Write|for example): tfdist ([^A-Z…,\n]+)$", message.strip())
    return shlex.split(command[1]) if command else []


LAUNCH_MISTAKES = [
    ([], "What the workers run is missing"),
    (["-n", "2"], "What the workers run is missing"),
    (["-n", "2", "--"], "Nothing follows `--`"),
    (["a.py"], "--workers=N is missing"),
    (["-n", "2", "none.py"], "There is no script 'none.py' in"),
    (["-n", "2", "alone.py"], "alone.py calls fit, and names no tfdist: .* Write tfdist.fit"),
    (["-n", "2", "a"], "'a' is no script, which ends with .py, and none of the verbs train"),
    (["-n", "2", "sweep", "a.gin"], "none of the verbs"),
    (["-n", "2", "--module=b", "a.py"], "--module=b and a.py are both what the workers run"),
    (["-n", "2", "--nodes=3", "a.py"], "Unknown command line flag 'nodes'"),
    (["-n", "0", "--", "x"], "flag --workers=0: 0 is not a positive integer"),
    (["-n", "two", "--", "x"], "flag --workers=two: invalid literal for int"),
    (["-n", "2", "--gin_file=x"], "What the workers run comes last"),
    (["-n", "2", "--launcher=hvd", "--", "x"], r"should be one of <tf_config\|horovod\|host\|ray\|ray_horovod>"),
    (["-n", "2", "--deadline_seconds=-1", "--", "x"], "seconds=-1.0: must be a number of seconds above 0"),
    (["-n", "2", "--max_restarts=-1", "--", "x"], "flag --max_restarts=-1: -1 is not a non-negative integer"),
    (["-n", "2", "--min_workers=3", "--", "x"], "--min_workers=3 is more than --workers=2"),
    (["-n", "2", "--min_workers=1", "--max_restarts=0", "--", "x"], "leave --max_restarts=0 out"),
    (["-n", "2", "--max_workers=2", "--", "x"], "--max_workers=2 is for --hosts_command"),
    (["-n", "1", "--gpus=1", "--", "x"], "--gpus is Ray's: write --launcher=ray"),
    (["-n", "1", "--launcher=ray", "--gpus=1.5", "--", "x"], "--gpus above 1 must be a whole number"),
    (["-n", "1", "--launcher=ray", "--pin_cpus", "--", "x"], "--pin_cpus is for the workers of this machine"),
    (["--launcher=host", "--", "x"], "--launcher=host starts the worker that TF_CONFIG names"),
    (["--launcher=host", "-n", "2", "--", "x"], "--launcher=host starts one worker, this host's"),
    (["--hosts_command=a", "-n", "2", "--", "x"], "without --workers and --pin_cpus"),
    (["--hosts_command=a", "--launcher=ray", "--", "x"], "is for --launcher=tf_config or horovod"),
    (["--hosts_command=a", "--min_workers=3", "--max_workers=2", "--", "x"], "=3 is more than --max_workers"),
    (["-n", "2", "--hosts=a,b", "a.py"], "Leave --workers"),
    (["--hosts=a,b", "--launcher=ray", "a.py"], "Leave --workers and --hosts_command out, and --launcher but for"),
    (["--hosts=", "a.py"], "names 0 hosts"),
    (["--hosts=a", "a.py"], "names 1 hosts, and there is no file 'a'"),
    (["--hosts=a,a", "a.py"], "names a:2222 twice"),
    (["--hosts=a:port,b", "a.py"], "received 'a:port'"),
    (["--hosts=a:99999,b", "a.py"], "received 'a:99999'"),
    (["--hosts=:22,b", "a.py"], "received ':22'"),
    (["--hosts=::1,b", "a.py"], "received '::1': an IPv6 address stands in brackets"),
    (["--hosts=a.invalid,127.0.0.1", "a.py"], "The host 'a.invalid' of --hosts has no address"),
    (["--hosts=192.0.2.77,192.0.2.78", "a.py"], "is this machine, whose addresses are"),
    (["--hosts=localhost,127.0.0.1", "a.py"], "are both this machine"),
    (["--hosts=localhost,192.0.2.77", "a.py"], "--hosts lists localhost beside '192.0.2.77'"),
]


@pytest.mark.parametrize(
    ("typed", "message"), LAUNCH_MISTAKES, ids=lambda e: " ".join(e) if isinstance(e, list) else ""
)
def test_a_mistake_of_a_launch_is_one_message(
    typed: list[str], message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").touch()
    (tmp_path / "alone.py").write_text("model.fit(x, y)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        launch.parse(typed)
    assert raised.value.exit_status == 2
    if verb := find_advice(str(raised.value)):
        assert launch.parse(verb[1:])


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_a_verb_is_what_the_workers_run(dashes: list[str]) -> None:
    _, plan, *_ = launch.parse(["-n", "2", *dashes, "train", "a.gin"])
    assert plan.command[1:] == ("-m", "tfdist", "train", "a.gin")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"Port {port} of this machine cannot be used"):
            own_host.find_own_host(f"127.0.0.1:{port},192.0.2.77")


@pytest.mark.parametrize("as_file", [False, True])
def test_each_host_finds_itself_in_one_list(
    as_file: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = "192.0.2.77:2301,192.0.2.78"
    if as_file:
        (tmp_path / "hosts").write_text("# the machines\n192.0.2.77:2301\n\n192.0.2.78  # the second\n")
        hosts = str(tmp_path / "hosts")
    for index, address in enumerate(("192.0.2.77", "192.0.2.78")):
        monkeypatch.setattr(own_host, "get_own_addresses", lambda address=address: {address, "127.0.0.1"})
        assert own_host.find_own_host(hosts) == (["192.0.2.77:2301", "192.0.2.78:2222"], index)


@pytest.mark.slow
def test_a_script_runs_on_two_workers_with_its_own_arguments(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1:])\n")
    command = ["-m", "tfdist", "launch", "-n", "2", "script.py", "--lr", "0.1", "--help"]
    done = support.run_python(command, cwd=tmp_path).check()
    assert done.stdout.count("['--lr', '0.1', '--help']") == 2, done.stdout


def test_settings_are_listed_by_name_and_as_a_gin_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.run(["settings", "train.epochs", "tune.max_*"]) == 0
    shown = capsys.readouterr().out
    assert "train.epochs = " in shown and "tune.max_trials" in shown and "evaluate." not in shown
    assert verbs.run(["settings"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")]
    assert [each.name for each in settings_list.list_settings()] == [head.partition(" ")[0] for head in heads]


def test_a_report_of_a_fault_holds_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFDIST_X", "https://me:secret@host/x")
    monkeypatch.setenv("MY_TOKEN", "hidden")
    for name in ("SLURM_JWT", "HOROVOD_SECRET_KEY", "TF_VAR_password", "TFDIST_API_TOKEN"):
        monkeypatch.setenv(name, "hidden")
    assert verbs.run(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"tfdist {__version__}" in shown and "tensorflow" in shown and "TFDIST_X=" in shown
    assert "secret" not in shown and "hidden" not in shown


def test_the_shell_completes_verbs_flags_and_experiments() -> None:
    ask = 'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _tfdist; printf "%s\\n" "${COMPREPLY[@]}"'
    for typed, expected in [
        (["tr"], ["train"]),
        (["train", "--pro"], ["--profile"]),
        (["plan", "--dev"], ["--devices"]),
        (["launch", "--hos"], ["--hosts", "--hosts_command"]),
        (["train", "tfdist:experiments/digits_t"], ["digits_tfds.gin", "digits_tfrecord.gin", "digits_two_tasks.gin"]),
    ]:
        words = " ".join(f"'{word}'" for word in ["tfdist", *typed])
        script = f"{verbs.build_completion()}\nCOMP_WORDS=({words}); {ask}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert [line.removeprefix("tfdist:experiments/") for line in done.stdout.split()] == expected
