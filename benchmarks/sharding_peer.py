"""The encoder of sharding.py in PyTorch, its weights sharded by FSDP2 over gloo: one process of several.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=… python sharding_peer.py WAY LAYERS LENGTH WIDTH BATCH

WAY: fsdp2, or fsdp2_recomputed with blocks computed again in the backward pass. peer.py asks it for samples; tells what
the process's peak memory has grown by since PyTorch was imported, in MB, after two steps.
"""

from __future__ import annotations

import os
import sys

import torch
from measuring import peak_megabytes
from peer import serve, timed
from sizes import NUM_CLASSES
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch_models import Block


class Recomputed(Block):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, inputs, use_reentrant=False)


class Encoder(nn.Module):
    def __init__(self, layers: int, width: int, block: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for _ in range(layers))
        self.logits = nn.Linear(width, NUM_CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.logits(inputs.mean(1))


def main(way: str, layers: str, length: str, width: str, batch: str) -> None:
    count = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    before = peak_megabytes()
    torch.manual_seed(0)
    model = Encoder(int(layers), int(width), Recomputed if way == "fsdp2_recomputed" else Block)
    mesh = init_device_mesh("cpu", (count,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    share = int(batch) // count
    examples = torch.randn(8 * share, int(length), int(width)), torch.randint(0, NUM_CLASSES, (8 * share,))

    def train(steps: int) -> None:
        for step in range(steps):
            rows = slice(step % 8 * share, (step % 8 + 1) * share)
            loss = nn.functional.cross_entropy(model(examples[0][rows]), examples[1][rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        distributed.barrier()

    train(2)
    serve(timed(train), peak_megabytes() - before)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
