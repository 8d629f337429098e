"""Meshes whose dimensions are flattened, upon which DTensor merges collectives over these into one."""

from torch.distributed.device_mesh import DeviceMesh


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with names, after it has got a dimension over all of its ranks. A collective of the first call.

    No public name flattens a mesh, while torch advises it where collectives over several dimensions follow each other
    (https://github.com/pytorch/pytorch/pull/174630). Raises RuntimeError for a torch without that name.
    """
    if not hasattr(mesh, "_flatten"):
        raise RuntimeError("this torch has no DeviceMesh._flatten, with which DT-5 flattens meshes")
    mesh._flatten()
    return mesh
