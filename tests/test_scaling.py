"""Speed over processes and devices: layouts, all-reduces, and the projection that docs/scaling.md shows."""

import pytest

from benchmarks import scaling
from common.cli.errors import TrainingError


def test_an_all_reduce_takes_the_faster_way():
    link = 1.0, 100.0  # seconds of a hop, bytes/s
    assert scaling.all_reduce_seconds(800, 2, *link) == 2 + 8, "2 hops, and half of the bytes twice"
    assert scaling.all_reduce_seconds(80_000, 8, *link) == 14 + 1400, "around a ring"
    assert scaling.all_reduce_seconds(100, 8, *link) == 6 + 2, "up and down a tree of 3 levels"

    sizes = scaling.Sizes(what="project", update_ms=45, all_reduces=("16x36640",), all_gathers=("1x1230",))
    assert "| InfiniBand | 98%, " in scaling.projection(sizes)


@pytest.mark.slow
def test_all_reduces_are_measured_and_fitted():
    sizes = [10, 1000, 10**6]
    latency, slope, error = scaling.fit(sizes, [3e-4 + 2e-9 * size for size in sizes])
    assert (latency, slope) == pytest.approx((3e-4, 2e-9))
    assert error < 1e-6 < scaling.fit(sizes, [1e-3, 2e-3, 4e-3])[2]
    record = scaling.measure_all_reduce(scaling.Sizes(what="all-reduce", num_devices=2, largest=1))
    assert record["bytes"] == [1024 * 4**power for power in range(6)]
    assert all(seconds > 0 for seconds in record["seconds"])
    assert record["hop_us"] == pytest.approx(record["latency_us"] / 2)


SCRIPT = """
import json, os, sys
print(json.dumps({"words": sys.argv[1:], "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}))
sys.exit(3 if "--fail" in sys.argv and sys.argv[-1].endswith(",1/2") else 0)
"""


def test_processes_of_a_layout_know_each_other_and_share_the_devices(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    alone = scaling.run_in("1x4", [str(script)], {"steps": 5})
    assert alone == {"layout": "1x4", "words": ["--steps", "5", "--num-devices", "4"], "visible": "4,5,6,7"}
    first = scaling.run_in("2x2", [str(script)], {})
    assert first["visible"] == "4,5"
    assert first["words"][:3] == ["--num-devices", "4", "--distributed"]
    assert first["words"][3].startswith("127.0.0.1:") and first["words"][3].endswith(",0/2")
    with pytest.raises(TrainingError, match="2 processes with .*--fail --num-devices 2 failed"):
        scaling.run_in("2x1", [str(script)], {"fail": True})
