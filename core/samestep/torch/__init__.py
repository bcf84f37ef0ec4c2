"""Share code between PyTorch apps, without wrapping a training call.

* ``distributed``: devices, rendezvous, broadcast, all-gather, the flight recorder.
* ``reduction``: all-reduce in an order that no restart changes.
* ``weights``: model and optimizer as arrays.

It works with torch 2.11 and 2.13; the rest of samestep imports without torch.
"""
