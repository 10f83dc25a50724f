"""The command line, in this process on a toy model; the terminal's side of chat on a pseudo-terminal."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nanoserve import __version__, cli
from nanoserve.cli import inspect as inspecting
from nanoserve.cli.flags import engine_config, given
from nanoserve.cli.progress import Progress
from nanoserve.cli.sampling import HELP, NO_FLAG, sampling_params
from nanoserve.cli.serve import report
from nanoserve.core.config import Decision, EngineConfig, flag
from nanoserve.core.errors import ConfigError, EngineDeadError
from nanoserve.core.params import SamplingParams
from nanoserve.engine.messages import EngineInfo
from nanoserve.models.families import model_config
from nanoserve.models.parameters import num_parameters
from nanoserve.server.settings import ServerSettings

SMALL = ("--num-gpu-blocks-override", "64", "--max-model-len", "512", "--backend", "torch")


def parsed(*argv: str) -> argparse.Namespace:
    return cli._parse(argv)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that exits with 2."""
    try:
        status: Any = cli.main(argv)
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    return err


# ---- flags


@pytest.mark.parametrize("settings", [EngineConfig, ServerSettings])
def test_every_setting_of_a_server_is_a_flag(settings: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parsed("serve", "--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert [f.name for f in fields(settings) if f"{flag(f.name)}" not in text] == []


def test_every_sampling_parameter_is_a_flag_or_says_why_not() -> None:
    assert {f.name for f in fields(SamplingParams)} == {*HELP, *NO_FLAG}


def test_what_is_not_given_is_left_to_the_settings() -> None:
    arguments = parsed("serve")
    assert given(arguments, EngineConfig) == given(arguments, ServerSettings) == {}
    assert engine_config(arguments) == EngineConfig()


def test_flags_become_settings() -> None:
    arguments = parsed(
        "serve", "--max-model-len", "128", "--dtype", "float32", "--no-enable-prefix-caching", "--api-key", "a",
        "--api-key=b", "--gpu-memory-utilization", "0.5", "--port", "0",
    )  # fmt: skip
    assert engine_config(arguments) == EngineConfig(
        max_model_len=128, dtype="float32", enable_prefix_caching=False, gpu_memory_utilization=0.5
    )
    assert ServerSettings(**given(arguments, ServerSettings)) == ServerSettings(api_key=("a", "b"), port=0)


def test_the_model_is_positional_or_a_flag() -> None:
    for argv in (["org/name"], ["--model", "org/name"], ["org/name", "--model", "org/name"]):
        assert engine_config(parsed("serve", *argv)).model == "org/name"
    with pytest.raises(ConfigError, match="two models were given: a and --model b"):
        engine_config(parsed("serve", "a", "--model", "b"))


def test_sampling_flags_come_before_the_models_own_and_those_before_the_default() -> None:
    arguments = parsed("generate", "hi", "--top-k", "5", "--stop", "a", "--stop", "b", "--logit-bias", "3:-1.5",
                       "--stop-token-ids", "7", "--ignore-eos", "--seed", "9")  # fmt: skip
    assert sampling_params(arguments, {"temperature": 0.2, "top_k": 40}) == SamplingParams(
        top_k=5, stop=("a", "b"), logit_bias={3: -1.5}, stop_token_ids=(7,), ignore_eos=True, max_tokens=256,
        temperature=0.2,
    )  # fmt: skip
    assert engine_config(arguments).seed == 9


# ---- refusals


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "COMMAND"),
        (["frob"], "invalid choice: 'frob'"),
        (["serve", "--max-model-length", "3"], "'--max-model-length' is not understood (is it --max-model-len?)"),
        (["serve", "--max-model", "3"], "'--max-model' is not understood"),
        (["serve", "--max-model-len", "0"], "--max-model-len must be a whole number of at least 1, not 0"),
        (["serve", "--max-model-len", "many"], "--max-model-len: invalid int value: 'many'"),
        (["serve", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["serve", "--port", "80000"], "--port must be 0 to 65535"),
        (["serve", "a", "b"], "'b' is not understood"),
        (["pull"], "NAME"),
        (["pull", "no-such-model"], "known name (smollm2-135m-instruct)"),
        (["inspect", "/no/such/place"], "no such file or folder"),
        (["inspect", "--bandwidth", "0"], "--bandwidth must be over 0"),
        (["generate", "hi", "--threads", "100000"], "--threads must be at most 1024, not 100000"),
        (["generate", "hi", "--temperature", "-1"], "temperature must be at least 0"),
        (["generate", "hi", "--logit-bias", "3"], "'3' is not ID:NUMBER"),
        (["generate", "hi", "--logit-bias", "3:x"], "invalid ID:NUMBER value: '3:x'"),
        (["chat", "/no/such/place"], "no such file or folder"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    assert says in refused(capsys, *argv)


UNBUILT = {
    "tool-call-parser": "hermes", "reasoning-parser": "qwen3", "guided-decoding-backend": "x", "enable-lora": None,
    "lora-modules": "a=b", "cuda-graph-sizes": "8", "compilation-config": "3", "speculative-config": "{}",
    "num-speculative-tokens": "4", "quantization": "awq", "trust-remote-code": None, "allowed-media-domains": "x",
    "tensor-parallel-size": "2", "enable-auto-tool-choice": None,
}  # fmt: skip


@pytest.mark.parametrize("name", UNBUILT)
def test_A25_A27_A32_A36_A39_A45_A50_A56_A57_flags_of_what_is_not_built(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    value = UNBUILT[name]
    said = refused(capsys, "serve", "--port", "0", "--" + name, *([] if value is None else [value]))
    assert f"'--{name}' is not understood" in said
    with pytest.raises(TypeError, match=name.replace("-", "_")):
        EngineConfig(**{name.replace("-", "_"): value})


def test_a_damaged_checkpoint_is_one_line(capsys: pytest.CaptureFixture[str], toy: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((toy / "config.json").read_bytes())
    assert str(tmp_path) in refused(capsys, "inspect", str(tmp_path))
    config = json.loads((toy / "config.json").read_text())
    for wrong, says in (({"hidden_size": 0}, "hidden_size is 0"), ({"num_hidden_layers": 3}, "model.layers.2.")):
        damaged = shutil.copytree(toy, tmp_path / says)
        (damaged / "config.json").write_text(json.dumps(config | wrong))
        said = refused(capsys, "inspect", str(damaged))
        assert str(damaged) in said
        assert says in said
    (tmp_path / "model.gguf").write_bytes(b"GGUF\3\0\0\0")
    assert "model.gguf" in refused(capsys, "inspect", str(tmp_path / "model.gguf"))


def test_a_port_that_is_taken_is_said_before_the_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port} cannot be listened on" in refused(capsys, "serve", "/no/such/place", "--port", port)


@pytest.mark.parametrize(("error", "status"), [(EngineDeadError("gone"), 1), (KeyboardInterrupt(), 130)])
def test_other_ends_have_their_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int
) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["version"]) == status
    assert capsys.readouterr().err.count("\n") == 1


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} -m nanoserve serve --help | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in result.stderr


# ---- commands


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_pull_prints_the_path_alone(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", str(toy)]) == 0
    assert capsys.readouterr().out == f"{toy}\n"


def test_generate_prints_the_text_alone(
    toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["generate", "--model", str(toy), *SMALL, "--temperature", "0", "--max-tokens", "12", "--ignore-eos"]
    assert cli.main([*argv, "hello"]) == 0
    text = capsys.readouterr().out
    assert len(text) > 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == text
    assert cli.main([*argv, "hello", "--n", "2"]) == 0
    assert capsys.readouterr().out == f"--- 1 of 2\n{text}--- 2 of 2\n{text}"


def test_chat_reads_lines_and_remembers(
    toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(*lines: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        argv = ["chat", str(toy), *SMALL, "--temperature", "0", "--max-tokens", "8", "--ignore-eos"]
        assert cli.main([*argv, "--logit-bias", "10:-100"]) == 0  # no line feeds, so that a line is an answer
        return capsys.readouterr().out.splitlines()

    first, second = talk("hi", "", "hi")
    assert talk("hi", "/reset", "hi", "/exit", "hi") == [first, first]
    assert first != second


def test_chat_goes_on_after_a_line_that_does_not_fit(
    toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 600 + "\nhi\n"))
    assert cli.main(["chat", str(toy), *SMALL, "--max-tokens", "4"]) == 0
    err = capsys.readouterr().err
    assert "maximum context length is 512" in err
    assert "/reset makes room" in err
    assert "tokens, " in err or "1 tokens" in err


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends_the_talk(toy: Path) -> None:
    terminal, inside = pty.openpty()
    argv = [sys.executable, "-m", "nanoserve", "chat", str(toy), *SMALL, "--ignore-eos"]
    child = subprocess.Popen(argv, stdin=inside, stdout=inside, stderr=inside, start_new_session=True)
    os.close(inside)
    seen = ""

    def until(*texts: str, pressing: bool = False) -> None:
        """Read up to one of `texts`. Ctrl-C is pressed again where nothing follows, as people do: the prompt heeds one
        that comes in the moment before it waits with the next key only."""
        nonlocal seen
        if pressing:
            child.send_signal(signal.SIGINT)
        while not any(text in seen for text in texts):
            if select.select([terminal], [], [], 2 if pressing else 60)[0]:
                seen += os.read(terminal, 4096).decode(errors="replace")
            else:
                assert pressing, seen
                child.send_signal(signal.SIGINT)
        seen = min((seen.partition(text)[2] for text in texts), key=len)

    until("> ")
    until("> ", pressing=True)
    while select.select([terminal], [], [], 1)[0]:  # a last press may have brought one more prompt
        os.read(terminal, 4096)
    os.write(terminal, b"hello\r")
    until("hello\r\n")
    until(*"abcdefghijklmnopqrstuvwxyz")  # an answer has begun
    until(", stopped]", pressing=True)
    until("> ")
    os.write(terminal, b"\x04")
    assert child.wait(60) == 0
    os.close(terminal)


def test_inspect_counts_what_the_files_have(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["inspect", str(toy), "--bandwidth", "10", "--max-model-len", "100", "--dtype", "float32"]
    assert cli.main([*argv, "--kv-cache-memory-bytes", "1000000", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    model = model_config(json.loads((toy / "config.json").read_text()))
    weights = 4 * num_parameters(model)
    per_token = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head dim, bytes
    blocks = 1_000_000 // (16 * per_token)
    assert facts["parameters"] == facts["active_parameters"] == num_parameters(model)
    assert (facts["weight_bytes"], facts["weight_types"]) == (weights, {"float32": weights})
    assert (facts["kv_bytes_per_token"], facts["kv_dtype"]) == (per_token, "float32")
    assert (facts["blocks"], facts["tokens"], facts["sequences"]) == (blocks, blocks * 16, blocks // 7)
    assert facts["floor_ms"] == pytest.approx(weights / 10e9 * 1e3)
    assert facts["floor_full_ms"] == pytest.approx((weights + 100 * per_token) / 10e9 * 1e3)


def test_inspect_leaves_an_untied_embedding_out_of_the_floor(tmp_path: Path) -> None:
    from nanoserve.bench.toy import make_toy

    folder = make_toy(tmp_path / "untied", tie_word_embeddings=False)
    facts = inspecting.gather(EngineConfig(model=str(folder)), folder, 10.0)
    assert facts.floor_ms * 10e6 == pytest.approx(facts.weight_bytes - 259 * 64 * 4)


def test_inspect_measures_what_it_is_not_told(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspecting, "PROBE_BYTES", 1 << 20)
    facts = inspecting.gather(EngineConfig(model=str(toy)), toy, None)
    assert facts.bandwidth_measured
    assert 0 < facts.bandwidth < 1e5
    assert facts.sequences == facts.blocks // (512 // 16)
    assert 0 < facts.blocks * 16 * facts.kv_bytes_per_token <= facts.memory_bytes
    text = inspecting.table(facts)
    assert f"{facts.parameters:,} total" in text
    assert "(measured)" in text


def test_the_report_of_a_start_says_what_was_decided_and_what_to_try() -> None:
    info = EngineInfo(
        model="/m", family="llama", vocab_size=9, max_model_len=64, eos_token_ids=(2,), num_blocks=100, block_size=16,
        num_parameters=1_500_000, weight_bytes=6_000_000, kv_bytes_per_token=1000,
        decisions=(Decision("num_blocks", "100", "because"), Decision("dtype", "float32", "exact")),
        seconds={}, sampling_defaults={},
    )  # fmt: skip
    text = report("it's", "http://127.0.0.1:1", info, {"weights": 1.0, "total": 1.5}, with_key=True)
    assert "1.50 s: weights 1.00" in text
    assert "100 blocks of 16 tokens: 1,600 tokens, 1.6 MB (because)" in text
    assert "dtype float32: exact" in text
    command = text.splitlines()[-1].removeprefix("try").strip()
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True).stdout
    assert words.splitlines()[:2] == ["curl", "http://127.0.0.1:1/v1/chat/completions"]
    assert "Authorization: Bearer YOUR-KEY" in words
    assert json.loads(words.splitlines()[-1])["model"] == "it's"


def test_progress_off_a_terminal_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        for done in range(1000):
            progress("model", done << 14, 1000 << 14)
        progress("weights", 1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["model: 0 of 16.4 MB", "weights: 1 of 2"]


def test_help_answers_before_a_person_notices() -> None:
    """Without the imports that take long; a time would depend on the machine."""
    code = (
        "import sys, nanoserve.cli\n"
        "try: nanoserve.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'fastapi', 'tqdm', 'msgspec', 'huggingface_hub'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[]"
