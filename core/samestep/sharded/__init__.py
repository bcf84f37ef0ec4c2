"""Save and load models that no rank holds as a whole.

* ``tensors``: a rank's shard of an array, and a stored array that can be read in parts.
* ``storage``: checkpoints, a shard from each rank.
* ``run``: a `Run` of such a model.
"""
