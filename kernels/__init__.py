"""Device operations of the engine, one per file: a Triton kernel, and the plain torch reference that defines its
result.

`<operation>(...)` runs the Triton kernel (CUDA tensors, or any tensors under TRITON_INTERPRET=1);
`<operation>_reference(...)` is plain torch, defines the result and is what the executor runs on a CPU. Both have the
same signature. No operation waits for the device, so CUDA graphs can capture the Triton forms.
"""
