"""Save and load models that are sharded over the ranks.

* ``tensors``: a rank's shard of an array, and a stored array that can be read in parts.
* ``storage``: checkpoints to which each rank writes its shards.
* ``shards``: the `samestep.run.Storage` of a sharded model.
"""
