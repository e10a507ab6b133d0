"""Files of fabrics: devices by name, curves of several libraries, two sockets."""

from __future__ import annotations

import re

import pytest

from rewriter.common.errors import RewriterError
from rewriter.fabric import Call, load_fabric
from rewriter.fabric.schema import LIBRARY, parse


def test_an_unknown_device_is_told_with_the_nearest() -> None:
    text = (LIBRARY / "h100-nvlink.yaml").read_text()
    with pytest.raises(RewriterError, match=r"line 5: device: 'h100-sx'. Did you mean 'h100-sxm'"):
        parse(text.replace("device: h100-sxm", "device: h100-sx"), "mine.yaml")


def test_what_stands_under_measurements_is_one_library_or_several() -> None:
    text = (LIBRARY / "gb10-roce.yaml").read_text()
    assert load_fabric("gb10-roce").libraries == ("nccl", "roce-one-shot")
    call = Call("all_reduce", 49152, range(4))
    assert load_fabric("gb10-roce").delay_model("nccl").delay(call).seconds == pytest.approx(59e-6)
    assert load_fabric("gb10-roce").delay_model().delay(call).library == "roce-one-shot"
    without = re.sub(r"  curves:\n(    .*\n)+", "", text)
    with pytest.raises(RewriterError, match="neither `points` nor `curves`"):
        parse(without, "mine.yaml")


def test_a_step_through_two_sockets_takes_longer() -> None:
    formula = load_fabric("h100-no-p2p").formula
    small = [formula.delay(Call("all_reduce", 4096, range(ranks))).seconds * 1e6 for ranks in (2, 4, 8)]
    assert small == pytest.approx([12.1, 22.5, 54.6], abs=0.5)


def test_a_library_is_given_no_message_beyond_its_limit() -> None:
    model = load_fabric("gb10-roce").delay_model()
    assert model.delay(Call("all_reduce", 2 << 20, range(4))).library == "roce-one-shot"
    assert model.delay(Call("all_reduce", (2 << 20) + 1, range(4))).library == "nccl"
