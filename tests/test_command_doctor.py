"""The command line: `entwine doctor`."""

import json

import jax
import pytest

from entwine_jax import _obstacles
from entwine_jax._command import _doctor, main


def test_without_gpus(capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has GPUs")
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "JAX sees no GPU: install jax[cuda13]" in told
    assert "fused' on CPU devices: yes" in told and "'xla': always" in told
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["jax"] == jax.__version__ and len(found["devices"]) == jax.device_count()
    assert found["obstacles"]


class Gpu:
    platform, device_kind, process_index, compute_capability = "gpu", "NVIDIA H200", 0, "9.0"

    def __init__(self, number):
        self.id = number


def gpus(monkeypatch, count, nccl, peers=None):
    monkeypatch.setattr(_doctor.jax, "devices", lambda: [Gpu(i) for i in range(count)])
    monkeypatch.setattr(_doctor._core, "cuda_built", lambda: True)
    monkeypatch.setattr(_doctor._core, "nccl", lambda: nccl, raising=False)
    monkeypatch.setattr(_obstacles, "peer_obstacle", lambda: peers)
    monkeypatch.setattr(_obstacles, "hopper_obstacle", lambda: None)
    monkeypatch.setattr(_obstacles, "domains", lambda: tuple(i // 2 for i in range(count)))


def test_two_gpus(monkeypatch, capsys):
    gpus(monkeypatch, 2, ("2.28.9", "/lib/libnccl.so.2", ""))
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "NCCL: 2.28.9 /lib/libnccl.so.2" in told and "strategies 'fused' and 'resident' on GPUs: yes" in told
    assert "device 1: gpu, NVIDIA H200, compute capability 9.0" in told
    assert "domains" not in told


def test_two_hosts(monkeypatch, capsys):
    gpus(monkeypatch, 4, ("2.28.9", "/lib/libnccl.so.2", ""))
    assert main(["doctor"]) == 0
    assert "NVLink domains: 2; a team that keeps within one can be fused" in capsys.readouterr().out


@pytest.mark.parametrize(
    "count, nccl, peers, words",
    [
        (1, ("2.28.9", "", ""), None, "JAX sees one GPU: a team needs two or more"),
        (2, ("", "", "no NCCL is loaded in this process"), None, "no NCCL is loaded"),
        (2, ("2.28.9", "", ""), "device 0 can't access the memory of device 1", "device 0 can't access"),
    ],
)
def test_what_is_missing(monkeypatch, capsys, count, nccl, peers, words):
    gpus(monkeypatch, count, nccl, peers)
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert words in told
    # Strategy "signal" needs no peer access.
    assert ("strategy 'signal' on GPUs: yes" in told) == (peers is not None)


def test_usage():
    with pytest.raises(SystemExit):
        main([])
