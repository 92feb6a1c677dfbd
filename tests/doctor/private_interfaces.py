"""The private interfaces of Keras and TensorFlow that tfdist leans on.

Invariant: tfdist uses no others; test_private_interfaces.py reads the source for them.
"""

from __future__ import annotations

# Functions and classes by the module that has them, and what nothing public does.
OF_MODULES = {
    "keras.src.backend.common": {"global_state": "variables that have no values yet"},
    "keras.src.backend.common.variables": {
        "AutocastScope": "a layer's weights in its compute type, where it is computed a second time",
    },
    "keras.src.losses.loss": {
        "scale_loss_for_distribution": "a loss that is not divided by the number of replicas",
    },
    "keras.src.trainers.compile_utils": {
        "get_loss": "'crossentropy' chosen by shapes, and a plain function as a loss, as compile() does",
        "get_metric": "'accuracy' chosen by shapes, as compile() does",
    },
    "keras.src.trainers.data_adapters": {"get_data_adapter": "what fit takes as data, read as fit reads it"},
    "keras.src.trainers.data_adapters.array_data_adapter": {"ArrayDataAdapter": "which of them are arrays"},
    "keras.src.trainers.data_adapters.array_slicing": {"train_validation_split": "validation_split, cut as fit cuts"},
    "tensorflow.compiler.tf2xla.ops.gen_xla_ops": {
        "xla_all_reduce": "the reduction of a program that is compiled for a TPU",
        "xla_replica_id": "the replica's index in such a program",
    },
    "tensorflow.python.eager.context": {
        "context": "a heartbeat timeout; whether a worker's process died; whether this process has computed"
    },
    "tensorflow.python.distribute.one_device_strategy": {"OneDeviceExtended": "a strategy with Horovod's collectives"},
    "tensorflow.python.ops.resource_variable_ops": {
        "UninitializedVariable": "a plan of a model that is larger than this machine's memory"
    },
    "tensorflow.python.framework.config": {
        "is_op_determinism_enabled": "the public module can only switch determinism on",
        "disable_op_determinism": "so that one run of a process does not change the next",
    },
}

# Attributes by the object that has them.
OF_OBJECTS = {
    "context": {
        "configure_coordination_service": "a heartbeat timeout for MultiWorkerMirroredStrategy",
        "check_collective_ops_peer_health": "whether the process of a worker is gone",
        "abort_collective_ops": "an end to collectives that wait for it",
        "_collective_leader": "whether a script has made a strategy of its own that joins others",
    },
    "layer": {
        "_flatten_layers": "the layers at any depth",
        "_loss_ids": "the same",
        "_losses": "what add_loss adds, kept apart by replica",
        "_non_trainable_variables": "a layer's own, whether it is trained or not",
        "_seed_generators": "other random numbers on each replica",
    },
    "normalization": {"_moments": "statistics over all replicas"},
    "symbol": {"_keras_mask": "the mask that a loss counts by"},
    "probabilities": {"_keras_logits": "what a crossentropy of them is computed by"},
    "model": {
        "_compile_config": "what the user gave to compile()",
        "_compile_loss": "whether there is one",
        "_compile_metrics": "metrics built before the first step",
        "_distribute_strategy": "the strategy is not left behind in the model",
        "_loss_tracker": "a compiled model is trained as if it were not",
        "_symbolic_build": "the compiled loss and metrics are built after tfdist.fit, as after fit",
    },
    "metric of a function": {
        "_fn": "a metric of its own for each training; the configuration knows the function by name alone",
        "_fn_kwargs": "the same",
    },
    "optimizer": {
        "_all_reduce_sum_gradients": "gradients are summed once, before",
        "_apply_weight_decay": "decay by groups",
        "_clip_gradients": "clipping of all gradients before each replica updates its own",
        "_get_variable_index": "the group of a variable",
        "_learning_rate": "whether a schedule sets it, whose rate is computed once for all variables",
        "_model_variables_moving_average": "the averages of use_ema",
        "_trainable_variables": "the variables of those averages, and of one of several optimizers",
        "_trainable_variables_indices": "the places of variables of a model that moves into a strategy",
        "_var_key": "the same",
        "_use_weight_decay": "decay by groups keeps what the optimizer excludes",
    },
    "extended strategy": {
        "_get_cross_device_ops": "all-to-all and all-gather between workers",
        "_get_variable_creator_initial_value": "variables of types that TensorFlow does not broadcast",
    },
    "operations across devices": {"_launchers": "the same"},
    "launcher of collectives": {
        "_get_ordering_token": "collectives in one order",
        "_group_key": "the workers of an all-to-all",
        "_next_instance_key": "which all-to-all it is",
    },
    "variable": {
        "_deferred_initialize": "a value that was put off",
        "_initialize": "a model that was made in no scope moves into a strategy",
        "_value": "one replica's variable as a Keras variable of its own",
    },
    "tensorboard": {
        "_is_tracing": "not kept in a checkpoint",
        "_profiler_started": "not kept in a checkpoint",
        "_should_trace": "whether it acts on batches",
    },
    "client of Cloud Storage": {"_bucket_metadata_cache": "no thread asks for the bucket, and draws random numbers"},
    "dataset": {"_inputs": "the parts of a user's tf.data pipeline"},
    "batched dataset": {"_batch_size": "how many examples a batch holds"},
    "graph": {"_get_function": "the bodies of loops and branches, for the plan of a step's memory"},
}
