"""Training scripts in the shapes in which people write them, and tests that they keep working.

Each script is a module with `main(fused)`. For `fused=""` it is the script as it was; otherwise it
has the changes that README and docs/ ask for, and `fused` is the `memory` of `convert`. The data
are made up: no script downloads any.
"""
