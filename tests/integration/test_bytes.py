"""What the Instance counts is what the engine allocates: parameters, gradients and states, byte for byte."""

from __future__ import annotations

import pytest
import torch

from lazytrain_ds.workload.blocks import find_blocks
from lazytrain_ds.workload.trace import trace_with_inputs
from tests.integration.training import config, engine_of
from tests.runtime.zero3 import one_process_group
from tests.workload.models import TinyLM, llama, qwen2


def frozen_parts() -> torch.nn.Module:
    """Odd widths; frozen parameters within a block and a block that is frozen whole."""
    model = TinyLM(depth=3)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].norm.requires_grad_(False)
    return model


MODELS = {"llama": llama, "qwen2-tied": qwen2, "frozen": frozen_parts, "mlp-tied": lambda: TinyLM(tied=True)}


@pytest.mark.integration
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_exact(name, dtype):
    model = MODELS[name]()
    if dtype == "bf16":
        model = model.bfloat16()
    settings = config({"parameters": "host", "optimizer_states": "host", "sequence_length": 16}, dtype)
    with engine_of(model, settings) as engine:
        instance, optimizer = engine.lazytrain_instance, engine.optimizer
        blocks = engine._lt_setup.store.blocks
        expected = [instance.block_class(index).parameter_bytes for index in range(instance.block_count)]
        assert [block.byte_count for block in blocks] == expected
        trainable = sum(instance.block_class(index).trainable_count for index in range(instance.block_count))
        gradients = sum(buffer.numel() * buffer.element_size() for buffer in optimizer._lt_group_gradients)
        assert gradients == trainable * instance.accumulation_bytes_per_parameter
        mode = instance.optimizer_mode("host", "fp32")
        masters = optimizer.fp32_partitioned_groups_flat
        tensors = {id(tensor): tensor for tensor in masters}
        for state in optimizer.optimizer.state.values():
            moments = (value for value in state.values() if torch.is_tensor(value) and value.numel() > 1)
            tensors.update({id(tensor): tensor for tensor in moments})
        states = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        assert states == trainable * mode.state_bytes_per_parameter


@pytest.mark.integration
def test_a_model_that_zero_init_partitioned_is_traced_as_if_whole():
    one_process_group()
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=config(None)):
        partitioned = TinyLM(depth=3).train()
    assert next(partitioned.parameters()).numel() == 0
    ids = torch.zeros(2, 8, dtype=torch.long)
    whole = TinyLM(depth=3).train()
    table = find_blocks(partitioned)
    assert table == find_blocks(whole)
    traced = trace_with_inputs(partitioned, table, (ids,), {"labels": ids})
    assert traced == trace_with_inputs(whole, table, (ids,), {"labels": ids})
    assert all(parameter.numel() == 0 for parameter in partitioned.parameters())
