"""What README shows is what is printed, and what tests assert."""

import re

from tests.commands import ROOT, output_of
from tests.ut.platform.torch.test_clip_128_ranks import SIZES

README = (ROOT / "README.md").read_text()


def test_explained_configuration_is_printed_so():
    config = "configs/text_moe_fsdp4_tp2_ep4_offload.yaml"
    shown = README.partition(f"`{config}`:\n\n```\n")[2].partition("```")[0]
    printed = output_of("-m", "hyper_parallel.explain", config).stdout

    def without_the_machine(text):
        return re.sub(r"(kernels:  host shards: ).*", r"\1...", text)

    assert without_the_machine(printed) == without_the_machine(shown)


def test_sizes_for_128_ranks_are_those_that_the_slow_test_asserts():
    section = README.partition("## 128 ranks\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| (\d+) \| ([\d,]+) bytes \| ([\d.]+) kB \|", section, re.M)
    assert rows == [
        (str(num_lanes), f"{buffer_bytes:,}", f"{exchange_bytes / 1000:.1f}")
        for num_lanes, buffer_bytes, exchange_bytes in SIZES.values()
    ]
