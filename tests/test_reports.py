"""Every public bug report that was looked at has a test that names it in its docstring."""

import ast
import functools
from pathlib import Path

import pytest

REPORTS = """
hyper-parallel#612 pytorch#148532 torchtune#1977 axolotl#3058 Automodel#3461 ms-swift#9844
Megatron-LM(lite)#21 pytorch#136156 pytorch#180346 accelerate#4219 torchtune#2420 pytorch#121020
VeOmni#184 hyper-parallel#279 TransformerEngine(ROCm)#715 Model-Optimizer#1621 ColossalAI#2192
SpecForge#663 verl-omni#539 pytorch#46849 torchtitan#4135 fairscale#263 burn#5699 pytorch#169445
pytorch#133586 pytorch#60691 torchrec#4421 torchrec#3809 VeOmni#758 transformers#46113
DeepSpeed#7967 DeepSpeed#5241 LlamaFactory#10640 pytorch#170862 twinkle#290 Megatron-LM#7338
fairscale#1167 prismatic-vlms#35 NeMo-RL#1426 OLMo#261 transformers#614 prime-rl#3196
Megatron-LM#5395 torchtitan#596 torchtitan#649 torchrec#3891
""".split()  # noqa: SIM905 - a list of as many strings is harder to read


@functools.cache
def docstrings_of_tests() -> str:
    found = []
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.append(ast.get_docstring(node) or "")
    return "\n".join(found).replace(" (", "(")


@pytest.mark.parametrize("report", [*REPORTS, "hyper-parallel unit tests", "while surveying"])
def test_report_has_a_test(report):
    assert report in docstrings_of_tests()
