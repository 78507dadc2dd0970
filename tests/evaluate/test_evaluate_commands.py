"""`evaluate`, `generate` and `checkpoint` on a trained run, and fine-tuning from the run and its export."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from megatron_files import write_megatron
from slowness import scaled

from ezpz_llm import checkpoint
from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.evaluate import command as evaluate, generation as generate
from ezpz_llm.training.evaluate.model import add_arguments, plan_model
from ezpz_llm.training.hf.source import find_source
from ezpz_llm.training.hf.weights import open_weights
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import load_values

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "80", "HF_HUB_OFFLINE": "1"}
SMALL = ["--eval-tokens", "2048", "--log-every", "5", "--precision", "fp32", "--profile", "false"]
SHAPE = ["--n-layer", "2", "--n-embd", "64", "--block-size", "64"]
ITEMS = [{"ctx": f"def f{n}(x):", "endings": ["return x", "zqj", "pass it on", "import os"], "label": n % 4}
         for n in range(7)]


def run(*words: str, cwd: Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run one of our commands under launch."""
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", str(ranks), "--run-dir", str(cwd / f"at-{words[1]}"),
               sys.executable, "-m", f"ezpz_llm.{words[0]}", *words[2:]]
    return subprocess.run(command, env=ENV, cwd=cwd, capture_output=True, text=True,
                          timeout=scaled(150), check=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train 40 steps on two ranks with two checkpoints, and HellaSwag in training."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    done = run("train", "run", *SMALL, *SHAPE, "--steps", "40", "--lr", "0.002", "--save-every", "20",
               "--sample-tokens", "5", "--top-k", "1", "--eval-every", "20",
               "--hellaswag", str(folder / "items.jsonl"),
               "--hellaswag-every", "20", "--hellaswag-items", "6", cwd=folder, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "log").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    assert checkpoint.main(["export", str(trained / "at-run"), str(trained / "hf")]) == 0
    return trained / "hf"


@pytest.fixture
def inside(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a temporary folder, for the run directories of commands in this process."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_precision_of_the_command_line_overrides_a_ds_config(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}')
    parser = argparse.ArgumentParser()
    add_arguments(parser, batch=4)
    words = [str(trained / "at-run"), "--ds-config", str(tmp_path / "mine.json"), "--device", "cpu"]
    for options, expected in (((), "bf16"), (("--precision", "fp32"), "fp32")):
        assert plan_model(parser.parse_args([*words, *options]), 1).resolved.precision == expected


def result_in(folder: Path) -> RunDir:
    return RunDir(folder / "result")


@pytest.mark.full
def test_hellaswag_in_training_is_in_metrics_and_record(trained: Path) -> None:
    lines = list(read_lines(RunDir(trained / "at-run").metrics))
    scored = [line for line in lines if "hellaswag_acc" in line]
    assert [line["step"] for line in scored] == [20, 40]
    record = read_record(RunDir(trained / "at-run")).hellaswag
    assert (record["step"], record["items"]) == (40, 6)
    assert record["acc_norm"] == scored[-1]["hellaswag_acc_norm"]
    assert record["acc_norm"] * 6 == pytest.approx(round(record["acc_norm"] * 6))
    assert "HellaSwag after step 20: acc_norm" in (trained / "log").read_text()


def test_evaluate_val_equals_the_loss_of_the_run(trained: Path, exported: Path, inside: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    measured = read_record(RunDir(trained / "at-run")).val_loss
    assert evaluate.main(["val", str(trained / "at-run"), "--precision", "fp32", "--device", "cpu",
                          "--run-dir", "result"]) == 0
    result = read_record(result_in(inside)).evaluation["val"]
    assert result["val_loss"] == pytest.approx(measured, rel=1e-6)
    assert result["val_tokens"] == 2048
    assert f"val_loss    {measured:.4f}" in capsys.readouterr().out
    shutil.rmtree(inside / "result")
    evaluate.main(["val", str(exported), "--precision", "fp32", "--corpus", "stdlib", "--tokens", "2048",
                   "--run-dir", "result"])
    # The run's softmax includes padded rows, which the export does not have.
    assert read_record(result_in(inside)).evaluation["val"]["val_loss"] == pytest.approx(measured, abs=0.05)


def test_advice_for_documents_without_separators_has_options_of_evaluate(trained: Path, inside: Path) -> None:
    shutil.copytree(trained / "at-run", inside / "masked")
    record = json.loads((inside / "masked/run.json").read_text())
    record["config"]["mask_documents"] = True
    (inside / "masked/run.json").write_text(json.dumps(record))
    corpus = write_megatron(inside / "unmarked", [np.arange(65, 90)] * 40, "uint16", list(range(41)))
    with pytest.raises(UserError, match="--mask-documents needs") as caught:
        evaluate.main(["val", str(inside / "masked"), "--corpus", str(corpus), "--device", "cpu"])
    assert caught.value.instead == ("preprocess the text again with Megatron's --append-eod, or pass another "
                                    "--corpus, since the model was trained with --mask-documents true")


def test_validation_in_a_shorter_context(exported: Path, inside: Path) -> None:
    """Windows of 32 tokens; the expected loss is that of a plain model on the same windows."""
    evaluate.main(["val", str(exported), "--precision", "fp32", "--device", "cpu", "--corpus", "stdlib", "--tokens",
                   "2048", "--block-size", "32", "--run-dir", "result"])
    source = find_source(str(exported), "test")
    model = GPT(source.model).eval()
    with open_weights(source) as weights:
        load_values(model, weights.read)
    tokens = torch.tensor(TokenData.open(prepare("stdlib", "bytes", progress=False)).split("val")[:2049].tolist())
    with torch.no_grad():
        expected = model(tokens[:-1].view(-1, 32), tokens[1:].view(-1, 32)).item()
    result = read_record(result_in(inside)).evaluation["val"]
    # Both are means of 2,048 losses in fp32: 2e-7 measured.
    assert (result["val_tokens"], result["val_loss"]) == (2048, pytest.approx(expected, rel=1e-6))


def test_a_corpus_with_a_path_from_another_folder_is_read_from_the_runs_shards(trained: Path, inside: Path) -> None:
    shutil.copytree(trained / "at-run", inside / "moved")
    path = inside / "moved/run.json"
    record = json.loads(path.read_text())
    measured = record["val_loss"]
    record["config"]["corpus"] = "elsewhere/text.txt"
    path.write_text(json.dumps(record))
    assert evaluate.main(["val", "moved", "--precision", "fp32", "--device", "cpu", "--run-dir", "result"]) == 0
    assert read_record(result_in(inside)).evaluation["val"]["val_loss"] == pytest.approx(measured, rel=1e-6)
    record["data"]["folder"] = str(inside / "gone")
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"elsewhere/text\.txt"):
        evaluate.main(["val", "moved", "--check"])


def test_evaluate_hellaswag_equals_the_score_of_the_run(trained: Path, inside: Path) -> None:
    evaluate.main(["hellaswag", str(trained / "at-run"), "--file", str(trained / "items.jsonl"), "--items", "6",
                   "--precision", "fp32", "--device", "cpu", "--run-dir", "result"])
    result = read_record(result_in(inside)).evaluation["hellaswag"]
    record = read_record(RunDir(trained / "at-run")).hellaswag
    assert {key: result[key] for key in ("acc", "acc_norm", "items")} == {
        key: record[key] for key in ("acc", "acc_norm", "items")}


def test_evaluate_and_generate_leave_no_run_directory(trained: Path, inside: Path) -> None:
    """Otherwise `report` and `explain` without a name would use it as the newest run."""
    evaluate.main(["val", str(trained / "at-run"), "--precision", "fp32", "--device", "cpu"])
    generate.main([str(trained / "at-run"), "--prompt", "import ", "--tokens", "2", "--device", "cpu"])
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.launch", sys.executable, "-m", "ezpz_llm.generate",
                           str(trained / "at-run"), "--prompt", "import ", "--tokens", "2", "--device", "cpu"],
                          env=ENV, cwd=inside, capture_output=True, text=True, timeout=scaled(150), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| import" in done.stdout
    assert list((inside / "runs").iterdir()) == []


def text_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert generate.main([*words, "--precision", "fp32", "--device", "cpu", "--run-dir", "made"]) == 0
    return capsys.readouterr().out


def test_run_checkpoint_and_export_generate_the_same_text(trained: Path, exported: Path, inside: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "import ", "--tokens", "12", "--samples", "3", "--batch", "2"]
    text = text_of(capsys, str(trained / "at-run"), *words)
    assert text.count("import ") == 3
    alone = text_of(capsys, str(exported), *words[:-1], "1").split("\n\n")[:3]
    assert len(set(alone)) == 3, "batches of one text draw different texts"
    for other in (trained / "at-run/checkpoints/step-00000040", exported):
        assert text_of(capsys, str(other), *words) == text
    assert text_of(capsys, str(exported), *words, "--seed", "43") != text
    assert text_of(capsys, str(trained / "at-run/checkpoints/step-00000020"), *words) != text
    greedy = text_of(capsys, str(exported), *words, "--top-k", "1").split("\n\n")[:3]
    assert len(set(greedy)) == 1
    assert greedy == text_of(capsys, str(exported), *words, "--temperature", "1e-6").split("\n\n")[:3]


def test_two_tensor_parallel_ranks_measure_and_draw_the_same(trained: Path, exported: Path, inside: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ds-config", "tp2", "--precision", "fp32", "--device", "cpu"]
    done = run("evaluate", "val", "val", str(trained / "at-run"), *options, cwd=inside, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = read_record(RunDir(inside / "at-val")).evaluation["val"]
    assert measured["val_loss"] == pytest.approx(read_record(RunDir(trained / "at-run")).val_loss, rel=1e-5)
    assert measured["val_tokens"] == 2048
    words = ["--prompt", "import ", "--tokens", "12", "--samples", "3", "--batch", "2"]
    text_of(capsys, str(trained / "at-run"), *words)
    done = run("generate", "generate", str(trained / "at-run"), *words, *options, cwd=inside, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(samples := read_record(RunDir(inside / "made")).samples) == 3
    assert read_record(RunDir(inside / "at-generate")).samples == samples


def test_a_text_ends_at_its_end_of_text_token() -> None:
    from ezpz_llm.training.data.tokenizers import get_tokenizer

    tokenizer = get_tokenizer("bytes")
    assert generate._text(tokenizer, [*b"ab", 256, *b"cd", 256, 70], prompt_length=3) == tokenizer.decode(
        [*b"ab", 256, *b"cd"])


def test_inspect_prints_the_contents(trained: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(["inspect", str(trained / "at-run"), "--parameters"]) == 0
    text = capsys.readouterr().out
    for row in ("step            40", "layout          zero1", "tokenizer       bytes", "257 in 320 rows",
                "transformer.h.1.attn.c_attn.weight", "192x64"):
        assert row in text
    checkpoint.main(["inspect", str(trained / "at-run"), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["state"]["consumed"] == 40 * 8
    assert facts["tensors"] == ["weight", "exp_avg", "exp_avg_sq"]
    checkpoint.main(["inspect", str(exported), "--json"])
    assert json.loads(capsys.readouterr().out)["model"]["vocab_size"] == 257


def test_verify_reports_damaged_checkpoints_and_continues(trained: Path, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained / "at-run", tmp_path / "run")
    assert checkpoint.main(["verify", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("intact") == 2
    folders = [tmp_path / f"run/checkpoints/step-000000{step}" for step in (20, 40)]
    shard = folders[0] / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 4
    shard.write_bytes(content)
    assert checkpoint.main(["verify", str(tmp_path / "run")]) == 1
    out, err = capsys.readouterr()
    assert "step-00000040" in out
    assert "step-00000020" not in out
    assert "rank-00001.safetensors has sha256" in err
    shard.write_bytes(content[:-9])
    assert checkpoint.main(["verify", str(folders[0])]) == 1
    assert "bytes, the manifest expects" in capsys.readouterr().err
    index = folders[1] / "index.json"
    stored = json.loads(index.read_text())
    stored["parameters"]["transformer.wte.weight"]["pieces"][0]["stop"] -= 1
    index.write_text(json.dumps(stored))
    manifest = json.loads((folders[1] / "manifest.json").read_text())
    from ezpz_llm.training.checkpoint.manifest import hash_file

    manifest["files"]["index.json"] = {"size": index.stat().st_size, "sha256": hash_file(index)}
    (folders[1] / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.main(["verify", str(folders[1])]) == 1
    assert "a gap or an overlap" in capsys.readouterr().err
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.main(["verify", str(tmp_path)])


@pytest.mark.full
def test_fine_tuning_starts_from_the_weights_under_any_layout(trained: Path, exported: Path) -> None:
    """Start from the export and from the checkpoint; the first loss is far below that of random weights."""
    before = read_record(RunDir(trained / "at-run")).val_loss
    first = {}
    for layout, source in (("tp2", trained / "at-run"), ("zero3", exported)):
        done = run("train", f"tuned-{layout}", *SMALL, "--init-from", str(source), "--ds-config", layout,
                   "--steps", "2", "--sample-tokens", "0", "--save-every", "-1", "--vocab-multiple", "64",
                   "--global-batch-size", "8", "--verbose", cwd=trained, ranks=2)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "fine-tuning: lr 3e-05" in done.stdout
        lines = list(read_lines(RunDir(trained / f"at-tuned-{layout}").metrics))
        first[layout] = lines[0]["loss"]
        assert lines[-1]["val_loss"] == pytest.approx(before, abs=0.3)
    assert first["zero3"] == pytest.approx(first["tp2"], abs=0.2)
    assert first["tp2"] < 4.5


@pytest.mark.parametrize(("words", "message"), [
    (["--init-from", "RUN", "--n-layer", "3"], "n_layer is 3, the weights have 2"),
    (["--init-from", "RUN", "--model", "gpt2-124m"], "gpt2-124m is not the model of these weights"),
    (["--init-from", "RUN", "--block-size", "128"], "or pass at most 64"),
    (["--init-from", "nowhere/at/all"], "no folder at"),
    (["--hellaswag", "nowhere.jsonl"], "the HellaSwag file cannot be read"),
    (["--temperature", "0"], "temperature is 0.0"),
    (["--top-k", "-1"], "top_k is -1"),
])
def test_mistakes_are_found_before_any_rank_starts(words: list[str], message: str, trained: Path) -> None:
    words = [str(trained / "at-run") if word == "RUN" else word for word in words]
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.train", *words, "--check", "--world-size", "2"], env=ENV,
                          capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(("words", "message"), [
    (["generate", "RUN", "--temperature", "0"], "the temperature is 0.0"),
    (["generate", "RUN", "--tp", "3"], "3"),
    (["generate", "RUN", "--samples", "0"], "samples is 0"),
    (["generate", "RUN", "--block-size", "0"], "block-size is 0"),
    (["evaluate", "val", "RUN", "--block-size", "65"], "or pass at most 64"),
    (["evaluate", "val", "HF"], "the corpus that the model was trained on is unknown"),
    (["evaluate", "val", "RUN", "--tokens", "-1"], "tokens is -1"),
    (["evaluate", "hellaswag", "RUN", "--file", "nowhere"], "cannot be read"),
    (["evaluate", "harness", "RUN", "--tasks", "x"], "one process, not on 2 ranks"),
])
def test_commands_find_mistakes_without_torch(words: list[str], message: str, trained: Path,
                                              exported: Path) -> None:
    places = {"RUN": str(trained / "at-run"), "HF": str(exported)}
    module, *rest = [places.get(word, word) for word in words]
    name = "ezpz_llm.evaluate" if module == "evaluate" else f"ezpz_llm.{module}"
    code = (f"import sys; from ezpz_llm.core.base.errors import run_command; from {name} import main\n"
            f"code = run_command(lambda argv: main({[*rest, '--check', '--world-size', '2']!r}))\n"
            "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules); raise SystemExit(code)")
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=scaled(60),
                          check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


@pytest.mark.slow
def test_the_harness_runs_on_the_exported_model(trained: Path, inside: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval.models.huggingface")
    rows = [{"query": item["ctx"], "choices": item["endings"], "gold": item["label"]} for item in ITEMS]
    (inside / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (inside / "tasks").mkdir()
    (inside / "tasks/endings.yaml").write_text(f"""task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {inside / 'rows.jsonl'}}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""")
    monkeypatch.setenv("HF_HOME", str(inside / "hf-home"))
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.evaluate", "harness", str(trained / "at-run"), "--tasks",
                           "endings", "--include-path", "tasks", "--run-dir", "made", "--device", "cpu"],
                          env={**ENV, "HF_HOME": str(inside / "hf-home"), "HF_DATASETS_OFFLINE": "1"}, cwd=inside,
                          capture_output=True, text=True, timeout=scaled(200), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    theirs = read_record(RunDir(inside / "made")).evaluation["harness"]["endings"]
    ours = harness_score(trained, inside)
    assert theirs["acc,none"] == ours
    with pytest.raises(UserError, match="the harness has no task nothing"):
        evaluate.main(["harness", str(trained / "at-run"), "--tasks", "nothing", "--run-dir", "other"])


def harness_score(trained: Path, inside: Path) -> float:
    """Return our acc, which equals the harness's here: the text has one space between context and ending."""
    evaluate.main(["hellaswag", str(trained / "at-run"), "--file", str(trained / "items.jsonl"), "--precision",
                   "fp32", "--device", "cpu", "--run-dir", "ours"])
    return read_record(RunDir(inside / "ours")).evaluation["hellaswag"]["acc"]


class Hub(BaseHTTPRequestHandler):
    """Stand-in for the hub: the list of a model's files, and the files."""

    files: ClassVar[dict[str, bytes]] = {}
    requested: ClassVar[list[str]] = []

    @classmethod
    def commit(cls) -> str:
        return hashlib.sha1(b"".join(cls.files.values())).hexdigest()

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/some/model/tree/"):
            body = json.dumps([{"type": "file", "path": file, "size": len(content), "oid": str(zlib.crc32(content))}
                               for file, content in self.files.items()]).encode()
        elif path.startswith("/api/models/some/model"):
            body = json.dumps({"id": "some/model", "sha": self.commit(), "private": False, "tags": [],
                               "downloads": 0, "siblings": [{"rfilename": file} for file in self.files]}).encode()
        elif path.startswith("/some/model/resolve/") and name in self.files:
            body = self.files[name]
            self.requested.append(name)
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for header, value in (("Content-Length", str(len(body))), ("ETag", f'"{zlib.crc32(body)}"'),
                              ("X-Repo-Commit", self.commit()), ("Content-Type", "application/json")):
            self.send_header(header, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_fetch_downloads_the_needed_files_and_no_pickles(exported: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    Hub.files = {path.name: path.read_bytes() for path in exported.iterdir()} | {"pytorch_model.bin": b"x" * 99}
    Hub.requested = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {**ENV, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"),
           "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def ezpz(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", *words], env=env, cwd=tmp_path, capture_output=True, text=True,
                              timeout=scaled(90), check=False)

    try:
        before = ezpz("ezpz_llm.generate", "some/model", "--check")
        assert (before.returncode, Hub.requested) == (2, [])
        assert "ezpz-llm checkpoint fetch some/model" in before.stderr
        done = ezpz("ezpz_llm.checkpoint", "fetch", "some/model")
        assert done.returncode == 0, done.stderr
        assert f"downloading some/model from {env['HF_ENDPOINT']}" in done.stderr
        assert {"config.json", "model.safetensors"} <= set(Hub.requested)
        assert "pytorch_model.bin" not in Hub.requested
        inspected = ezpz("ezpz_llm.checkpoint", "inspect", "some/model", "--json")
        assert inspected.returncode == 0, inspected.stderr
        assert json.loads(inspected.stdout)["model"]["vocab_size"] == 257
        missing = ezpz("ezpz_llm.checkpoint", "fetch", "some/other")
        assert missing.returncode == 1
        assert "the download failed" in missing.stderr
        assert "Traceback" not in missing.stderr
        Hub.files, Hub.requested = {"config.json": b'{"model_type": "bert"}', "model.safetensors": b"x" * 999}, []
        unsupported = ezpz("ezpz_llm.checkpoint", "fetch", "some/model", "--revision", "main")
        assert "model_type is 'bert'" in unsupported.stderr
        assert "model.safetensors" not in Hub.requested
    finally:
        server.shutdown()
        server.server_close()
