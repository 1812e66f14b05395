"""scripts/train.py: both models learn alike, alone and in two processes, stopped and resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from types import ModuleType

import pytest
import torch
from processes import run_python
from strategies import tell_again

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TINY = ["--size", "tiny", "--device", "cpu", "--folder"]
MODELS = ("eager", "fused")


# A fixture of the module trains before choices could be made for a test.
pytestmark = pytest.mark.as_dispatched


@pytest.fixture(scope="module")
def train() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        import train

    return train


@pytest.fixture(scope="module")
def alone(train: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nothing stopped."""
    # Before the first test: a test before it may have left the chain with other choices.
    tell_again()
    folder = tmp_path_factory.mktemp("alone")
    assert train.main([*TINY, str(folder)]) == 0
    return folder


def losses(folder: Path, name: str) -> list[float]:
    return torch.load(folder / f"{name}.pt")["curve"]["losses"]


def test_both_models_learn_alike(alone: Path) -> None:
    eager, fused = (losses(alone, name) for name in MODELS)
    torch.testing.assert_close(eager, fused, rtol=1e-4, atol=1e-4)
    assert len(eager) == 30
    assert eager[-1] < eager[0] - 0.5
    assert (alone / "train.png").stat().st_size > 5000
    assert set(MODELS) <= set((alone / "train.json").read_text().split('"'))


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_learn_as_one(
    parallel: str, train: ModuleType, alone: Path, tmp_path: Path
) -> None:
    """Each takes half of every batch; one process resumes what two have left."""
    process = run_python(
        *("-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", str(SCRIPTS / "train.py"), *TINY, str(tmp_path)),
        *("--model", "fused", "--parallel", parallel, "--steps", "6"),
        timeout=600,
        # Two cores have no room for four threads that wait for each other.
        OMP_NUM_THREADS="1",
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("tokens/s") == 1
    shared = losses(tmp_path, "fused")

    resume = [str(tmp_path), "--model", "fused", "--resume", "--steps", "12"]
    assert train.main([*TINY, *resume]) == 0
    resumed = losses(tmp_path, "fused")
    assert resumed[:6] == shared
    torch.testing.assert_close(resumed, losses(alone, "fused")[:12], rtol=1e-4, atol=1e-4)


def test_stopped_and_resumed_gives_the_same_bits(
    train: ModuleType,
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = train.Trainer.step

    def interrupted(trainer: object) -> None:
        step(trainer)
        if trainer.name == "fused" and len(trainer.curve.losses) == 17:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "step", interrupted)
        assert train.main([*TINY, str(tmp_path)]) == 130
    assert "--resume goes on from" in " ".join(capsys.readouterr().out.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eager.pt", "fused.pt"]
    assert len(losses(tmp_path, "fused")) == 17

    assert train.main([*TINY, str(tmp_path), "--resume"]) == 0
    for name in MODELS:
        mine, other = (torch.load(folder / f"{name}.pt") for folder in (tmp_path, alone))
        assert mine["curve"]["losses"] == other["curve"]["losses"]
        for key, tensor in other["model"].items():
            assert torch.equal(mine["model"][key], tensor), key


def test_second_interrupt_ends_at_once(
    train: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(train.Trainer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.main([*TINY, str(tmp_path)])
    assert signal.getsignal(signal.SIGINT) is before
    assert not list(tmp_path.iterdir())


def test_refuses_to_resume_another_training(
    train: ModuleType, alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.main([*TINY, str(alone), "--resume", "--seed", "1"])
    assert "was made with" in capsys.readouterr().err
