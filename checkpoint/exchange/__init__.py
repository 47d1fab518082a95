"""Export steps to the formats of other tools, and import their files as steps.

- `exporting` and `importing` hold the public functions.
- `entries` selects and names the entries of a step.
- `output` describes the files to write, and `writing` writes them.
- `safetensors_format`, `torch_format` and `dcp_format` know one format each. `sources` recognises what is imported.

Invariant: memory does not grow with the size of the state. Nothing that is imported can run code.
Failure behaviour: errors of `headrace.dataio.core.errors`.
"""
