"""Kernels come in pairs: `op.py` holds the public function and its plain jnp reference, which is the
definition, and `op_mgpu.py` its Mosaic GPU twin with the same arguments and result types.
"""
