"""Where a process's wall clock went, without gaps.

Invariant: the shares add up to all the time since the process began, because each moment belongs to the phase that the
process is in, and `heartbeat.beat` says where one phase ends and the next begins. A call of steps is divided further,
by what it measured of its waiting.
"""

from __future__ import annotations

# In the order in which a report stacks them.
SHARES = {
    "import": "starting Python, importing, reading the configuration",
    "connect": "meeting the other workers",
    "data": "opening data sets",
    "build": "building the model, tracing, compiling",
    "restore": "reading a checkpoint",
    "compute": "calls of steps, but for their waiting",
    "input_wait": "calls of steps that waited for a batch",
    "peer_wait": "calls of steps, and agreements between them, that waited for other workers",
    "callbacks": "between calls of steps: callbacks, logging, the loop itself",
    "evaluate": "evaluations",
    "checkpoint": "stalls by checkpoints",
    "finish": "the end: exporting, closing",
}
