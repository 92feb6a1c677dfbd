"""horovodrun as it is, but for the question how Horovod was built, for which it imports TensorFlow."""

from horovod.runner import launch

if __name__ == "__main__":
    launch.gloo_built = lambda verbose=False: True
    launch.mpi_built = lambda verbose=False: False
    launch.run_commandline()
