"""A training of sizes.py in PyTorch, which peer.py asks for samples: `python peers_torch.py NAME WAY`.

WAY: eager, bfloat16, whose gradients travel so, compiled, or channels_last, which is compiled too. With RANK and its
like set it is one of several processes that DistributedDataParallel joins over gloo, each with one thread. Tells the
number of trained weights.
"""

from __future__ import annotations

import os
import sys

import torch
from peer import serve, time_steps
from sizes import SIZES, examples
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch_models import build


def main(name: str, way: str) -> None:
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if workers > 1:
        torch.set_num_threads(1)
        distributed.init_process_group("gloo")
    size = SIZES[name]
    torch.manual_seed(0)
    model = build(size)
    x, y = (torch.from_numpy(array) for array in examples(size.num_examples, size.input_shape, size.vocabulary))
    y = y.long()
    if size.kind == "convnet":
        x = x.permute(0, 3, 1, 2).contiguous()
    if way == "channels_last":
        x, model = x.to(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
    weights = [each for each in model.parameters() if each.requires_grad]
    adam = torch.optim.Adam(weights, 1e-3, eps=1e-7, fused=True)
    net = nn.parallel.DistributedDataParallel(model) if workers > 1 else model
    if way == "bfloat16":
        net.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif way != "eager":
        net = torch.compile(net)
    share, steps_per_epoch = size.batch // workers, size.num_examples // size.batch
    order, done = torch.empty(0), 0

    def train(steps: int) -> None:
        nonlocal order, done
        total, hits = torch.zeros(()), torch.zeros((), dtype=torch.long)
        for _ in range(steps):
            step = done % steps_per_epoch
            if step == 0:
                order = torch.randperm(size.num_examples, generator=torch.Generator().manual_seed(done))
            begin = step * size.batch + rank * share
            rows = order[begin : begin + share]
            targets = y[rows]
            logits = net(x[rows])
            loss = nn.functional.cross_entropy(logits, targets)
            adam.zero_grad(set_to_none=True)
            loss.backward()
            adam.step()
            total += loss.detach()
            hits += (logits.detach().argmax(-1) == targets).sum()
            done += 1
        float(total), int(hits)

    train(3)
    serve(time_steps(train), sum(each.numel() for each in weights))
    if workers > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
