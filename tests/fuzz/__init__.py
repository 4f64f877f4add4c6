"""Generated programs, each of which compares fusedtrain with plain torch; `make fuzz` runs them.

A case is the source of a short program: it makes tensors, calls fusedtrain and plain torch, and
asserts that the results agree. Hypothesis draws the programs and shrinks those that fail.

    ops.py         functions of fusedtrain.functional: every layout, dtype and derivative;
                   chains.py and norms.py have those of more than one tensor
    modules.py     classes of fusedtrain.nn, which are functions of their parameters
    optimizers.py  fusedtrain.optim and GradScaler beside torch.optim and timm.optim
    conversions.py convert, fold_conv_bn and their kin, and revert, on whole networks
    networks.py    the source of a network
    edits.py       a stock model beside its converted copy through hooks, other children, flags,
                   patches, copies and calls of parts; pairs.py compares the two, changes.py has
                   the edits, zoo.py the models
    tensors.py     the source of one tensor: shapes, values, memory
    calls.py       the source of a program that compares two functions of tensors
    compare.py     how large a difference may be
    engine.py      runs programs, shrinks them, keeps the time
    known.py       defects that are known and not mended yet
"""
