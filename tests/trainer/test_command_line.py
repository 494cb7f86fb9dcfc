"""The commands that people type, in processes of their own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, run_python

SMALL_MODEL = "model: {dim: 16, num_layers: 1, num_heads: 2, mlp_dim: 16, expert_dim: 16}\n"
STEP_LINE = re.compile(
    r"step +(\d+)/\d+  loss \d+\.\d+  grad norm \S+  clip coef \d\.\d+  \d+ tokens/s"
    r"  clip: h2d (\d+), collectives (\d+), d2h (\d+), host_syncs (\d+)"
)


def write_config(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(SMALL_MODEL + text)
    return str(path)


def test_gloo_trains_on_the_cpu_without_copies(tmp_path):
    text = """
training: {steps: 3, backend: gloo, batch_size: 1, seq_len: 16}
accelerator: {ep_size: 2}
fsdp_config: {dp_shard_size: 2}
"""
    done = run_python("-m", "hyper_parallel.trainer", write_config(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert "simulated" not in done.stdout
    assert STEP_LINE.findall(done.stdout) == [(step, "0", "1", "0", "0") for step in "123"]


@pytest.mark.simnpu
def test_torchrun_ranks_train_on_the_simulated_npu(tmp_path):
    text = """
training: {steps: 2, batch_size: 1, seq_len: 16}
fsdp_config: {dp_shard_size: 2, enable_offload: true}
"""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    done = run_python("-m", *launcher, "hyper_parallel.trainer", write_config(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert "simulated" in done.stdout
    assert STEP_LINE.findall(done.stdout) == [(step, "0", "1", "1", "1") for step in "12"]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (
            "training: {stepz: 3, lr: fast}\naccelerator: {ep_size: 2}",
            ["training.stepz", "training.lr", "accelerator.ep_size"],
        ),
        ("data: {max_bytes: 5}", ["data.max_bytes"]),
        ("data: {path: /proc/self/mem}", ["data.path"]),
        ("fsdp_config: {dp_shard_size: 128}", ["fsdp_config.dp_shard_size"]),
        (
            "training: {backend: gloo}\nfsdp_config: {dp_shard_size: 100000}",
            ["fsdp_config.dp_shard_size"],
        ),
    ],
    ids=[
        "unknown-mistyped-contradictory",
        "too-little-text",
        "unreadable-text",
        "too-many-simulated-ranks",
        "too-many-gloo-ranks",
    ],
)
def test_config_error_names_the_keys_and_starts_no_rank(tmp_path, text, keys):
    done = run_python("-m", "hyper_parallel.trainer", write_config(tmp_path, text))
    assert done.returncode == 2
    assert [key for key in keys if key not in done.stderr] == []
    assert "Traceback" not in done.stderr
    assert "starting" not in done.stdout


def handle_signals_as_in_a_terminal():
    """Undo what nohup and `&` do to a child of the pytest process."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "to_all", "exit_code", "message"),
    [
        (signal.SIGINT, True, 130, "stopped by SIGINT\n"),  # Ctrl-C
        (signal.SIGTERM, False, 143, "stopped by SIGTERM\n"),
        (signal.SIGTERM, True, 143, "stopped by SIGTERM\n"),  # timeout
        (signal.SIGHUP, False, 129, "stopped by SIGHUP\n"),
        (signal.SIGHUP, True, 129, "stopped by SIGHUP\n"),  # a closed terminal
        (signal.SIGKILL, False, -9, ""),
    ],
    ids=["int-all", "term", "term-all", "hup", "hup-all", "kill"],
)
def test_signal_ends_the_ranks_too(tmp_path, number, to_all, exit_code, message):
    text = "training: {steps: 1000000, backend: gloo}\nfsdp_config: {dp_shard_size: 2}\n"
    process = subprocess.Popen(
        [sys.executable, "-m", "hyper_parallel.trainer", write_config(tmp_path, text)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=handle_signals_as_in_a_terminal,
    )
    try:
        while "step" not in process.stdout.readline():
            assert process.poll() is None
        (os.killpg if to_all else os.kill)(process.pid, number)
        # Both pipes end when the last process that holds them does: the ranks as well.
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (exit_code, message)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_ignored_hangup_stays_ignored_as_nohup_wants():
    program = """
import os, signal
from hyper_parallel.trainer.command_line import run_command
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print(run_command(lambda: os.kill(os.getpid(), signal.SIGHUP) or 7))
"""
    done = run_python("-c", program)
    assert done.stdout == "7\n", done.stderr


@pytest.mark.simnpu
def test_demo_reports_what_it_measured_on_the_last_line(tmp_path):
    text = """
training: {steps: 6, batch_size: 2, seq_len: 16, lr: 0.01, max_grad_norm: 0.01}
accelerator: {tp_size: 2, ep_size: 2}
fsdp_config: {dp_shard_size: 2, enable_offload: true}
"""
    done = run_python("-m", "hyper_parallel.trainer.demo", write_config(tmp_path, text))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report.pop("loss_last") < report.pop("loss_first")
    sampled_bytes = report["clip"].pop("sampled_bytes_read")
    assert 0 < sampled_bytes < 2000
    assert report == {
        "ranks": 4,
        "steps": 6,
        "clip": {
            "h2d": 0,
            "collectives": 1,
            "d2h": 1,
            "host_syncs": 1,
            "host_bytes_read": 0,
            "host_bytes_written": 0,
        },
        "offload_equals_resident": True,
        "torch_clip_error": "No backend type associated with device type cpu",
    }


@pytest.mark.simnpu
def test_demo_that_does_not_clip_does_not_claim_equality(tmp_path):
    text = """
training: {steps: 1, batch_size: 1, seq_len: 16, max_grad_norm: 1.0e+6}
fsdp_config: {dp_shard_size: 1, enable_offload: true}
"""
    done = run_python("-m", "hyper_parallel.trainer.demo", write_config(tmp_path, text))
    assert done.returncode == 1
    assert "not clipped" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["offload_equals_resident"] is False
