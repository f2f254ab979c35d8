"""Device operations, one per file: a Triton kernel beside the plain torch reference that defines it.

`<operation>(...)` runs the Triton kernel (CUDA tensors, or any tensors under TRITON_INTERPRET=1);
`<operation>_reference(...)` is plain torch: it defines the result, and the executor runs it on a CPU.
Both have the same signature. Nothing here waits for the device, so the Triton forms can be captured in a CUDA graph.
"""
