"""Secrets never appear in files written by launch, submit, or report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launch_runs import clean_env, launch, need_mpiexec
from slowness import scaled

VARIABLES = {name: f"planted{number:02}-Aa0_{name.lower()[:4]}" for number, name in enumerate((
    "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD", "DB_PASSWD", "DS_AUTH", "TORCH_PASS", "EZPZ_LLM_AUTH",
    "NCCL_PASSPHRASE", "EZPZ_LLM_CREDENTIAL", "TORCH_PAT", "HF_JWT", "MYSQL_PWD", "hf_token", "CUDA_SECRET"))}
URLS = {"http_proxy": "http://me:planted20-Aa0_http@proxy.invalid:3128",
        "https_proxy": "http://me:planted21-Aa0_https@proxy.invalid:3128",
        "EZPZ_LLM_DATABASE": "postgresql://me:planted22-Aa0_db@db.invalid/runs"}
WORDS = ["--auth", "planted30-Aa0", "--api-key", "planted31-Aa0", "--token=planted32-Aa0",
         "--header", "Authorization: Bearer planted33-Aa0", "password: planted34-Aa0", "hf_token=planted35-Aa0",
         "--url", "https://me:planted36-Aa0@host/x", "apiKey=planted37-Aa0", "--env=X_AUTH=planted38-Aa0"]
PROGRAM = """
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["EZPZ_LLM_RUN_DIR"])
if os.environ["RANK"] == "0":
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (1, 2, 3):
            print(json.dumps({"step": step, "loss": 1.0, "step_time_s": 0.1, "tokens_per_second": 1.0}), file=file)
raise ValueError("no access with " + os.environ["DS_AUTH"] + " by " + os.environ["http_proxy"])
"""


def _files_with_secrets(folder: Path) -> list[str]:
    """Return the files that contain a planted secret, with its context. Logs are excluded, since programs may print
    secrets."""
    matches = []
    for path in folder.rglob("*"):
        if path.is_file() and path.parent.name != "logs":
            text = path.read_bytes()
            matches += [f"{path.relative_to(folder)}: {text[at - 40:at + 20]!r}"
                        for at in [text.find(b"planted")] if at >= 0]
    return matches


def test_files_of_a_run_and_its_report_have_none_of_30_secrets(tmp_path: Path) -> None:
    need_mpiexec()
    assert len(VARIABLES) + len(URLS) + len(WORDS) - 4 == 30, "four of the words are option names"
    done = launch(tmp_path, "-n", "2", "--run-dir", "run", sys.executable, "-c", PROGRAM, *WORDS,
                  **VARIABLES, **URLS)
    assert done.returncode == 1
    assert "no access with" in done.stderr
    assert (tmp_path / "run/postmortem.txt").exists()
    report = subprocess.run([sys.executable, "-m", "ezpz_llm.report", "run", "--html", "page.html"], cwd=tmp_path,
                            env=clean_env(), capture_output=True, text=True, timeout=scaled(60), check=False)
    assert report.returncode == 0, report.stderr
    assert "no access with [redacted]" in (tmp_path / "run/postmortem.txt").read_text()
    assert _files_with_secrets(tmp_path) == []
    shown = launch(tmp_path, "--dry-run", "--explain", "-n", "2", "true", *WORDS, **VARIABLES, **URLS)
    assert "planted" not in shown.stdout + shown.stderr


def test_job_script_has_no_secret_and_command_with_a_secret_is_rejected(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ezpz_llm.submit", "--site", "polaris", "--nodes", "1", "--time", "0:10:00",
             "--account", "A", "--queue", "debug", "--dry-run", "--", "launch", "echo"]
    env = clean_env(**VARIABLES, **URLS, HF_HOME=f"/data/{VARIABLES['DS_AUTH']}", HF_HUB_CACHE="/data/kept")
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True,
                          timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr
    assert "planted" not in done.stdout + done.stderr
    assert "HF_HUB_CACHE=/data/kept" in done.stdout
    for typed in (["--auth", "planted-word"], ["--name", VARIABLES["DS_AUTH"]]):
        rejected = subprocess.run([*words, *typed], cwd=tmp_path, env=env, capture_output=True, text=True,
                                 timeout=scaled(60), check=False)
        assert rejected.returncode == 2
        assert "the command has a secret in it" in rejected.stderr
        assert "planted" not in rejected.stdout + rejected.stderr
    assert os.listdir(tmp_path) == []
