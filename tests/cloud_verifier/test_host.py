"""What the machine has, from files that say so."""

import torch

from cloud_verifier.host import _cgroup_free, _machine_free, cpu_flags, free_memory_bytes


def test_memory_of_the_machine_and_of_the_control_group(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 700 kB\n")
    assert _machine_free(tmp_path / "meminfo") == 700 * 1024
    assert _cgroup_free(tmp_path) > 1 << 60
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("1200\n")
    assert _cgroup_free(tmp_path) == 3800
    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup_free(tmp_path) > 1 << 60


def test_some_memory_is_free_here():
    assert 0 < free_memory_bytes(torch.device("cpu")) < 1 << 50


def test_the_flags_of_the_cpu(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    assert cpu_flags(cpuinfo) == frozenset()
    cpuinfo.write_text("model name: x\nflags\t\t: fpu avx2 avx512f\n")
    assert cpu_flags(cpuinfo) == {"fpu", "avx2", "avx512f"}
    cpuinfo.write_text("Features\t: fp asimd bf16\n")
    assert cpu_flags(cpuinfo) == {"fp", "asimd", "bf16"}
