"""The stand-in for Apex, in processes of its own."""

from __future__ import annotations

import os
import sys
import textwrap
from multiprocessing import get_all_start_methods
from pathlib import Path

import pytest

from fusedtrain.apex._run import main
from helpers import environment
from helpers.processes import Done, run_python


def python(folder: Path, *arguments: str) -> Done:
    return run_python(*arguments, cwd=folder, env=environment())


def check(folder: Path, code: str) -> None:
    run = python(folder, "-c", textwrap.dedent(code))
    assert run.returncode == 0, run.stderr


def test_imports_of_every_kind_in_any_order(tmp_path: Path) -> None:
    check(
        tmp_path,
        """
        import sys, importlib, importlib.util
        import fusedtrain
        assert not any(name.startswith("fusedtrain.apex") for name in sys.modules)
        first = fusedtrain.apex.install_apex()
        finders = list(sys.meta_path)

        def forget():
            for name in [n for n in sys.modules if n.partition(".")[0] == "apex"]:
                del sys.modules[name]

        statements = '''import apex
        from apex import amp, optimizers
        import apex.amp
        import apex.parallel.LARC
        from apex.parallel.LARC import LARC
        from apex.parallel import DistributedDataParallel as DDP
        from apex.parallel import LARC as module
        from apex.multi_tensor_apply import multi_tensor_applier
        from apex.optimizers.fused_adam import FusedAdam
        from apex.fp16_utils.fp16util import network_to_half
        from apex.parallel.distributed import Reducer
        from apex import parallel as p, fp16_utils'''.split("\\n")
        parallel = fusedtrain.apex.parallel
        for shift in range(len(statements)):
            namespace = {}
            for statement in statements[shift:] + statements[:shift]:
                exec(statement.strip(), namespace)
            assert namespace["DDP"] is parallel.DistributedDataParallel
            assert namespace["LARC"] is namespace["module"].LARC is fusedtrain.apex.larc.LARC
            assert namespace["p"] is namespace["apex"].parallel is sys.modules["apex.parallel"]
            assert namespace["amp"] is importlib.import_module("apex.amp") is namespace["apex"].amp
            assert namespace["apex"].parallel.LARC is namespace["module"]
            assert namespace["multi_tensor_applier"].available is False
            assert namespace["FusedAdam"] is fusedtrain.apex.optimizers.FusedAdam
            assert namespace["network_to_half"] is fusedtrain.apex.fp16_utils.network_to_half
            assert namespace["Reducer"] is parallel.Reducer
            forget()
            again = fusedtrain.apex.install_apex()
            assert again is not first and again is fusedtrain.apex.install_apex()
            assert sys.meta_path == finders
        import apex
        assert apex.__version__ == "0.1+fusedtrain." + fusedtrain.__version__
        for name in ("apex", "apex.amp"):
            assert "fusedtrain" in importlib.util.find_spec(name).origin
        assert "amp" in dir(apex) and "LARC" in dir(apex.parallel)
        assert "SyncBatchNorm" in dir(apex.parallel)
        assert apex.parallel.convert_syncbn_model is parallel.convert_syncbn_model
        assert not hasattr(apex.parallel, "__nothing__")
        """,
    )


def test_names_are_those_of_the_package(tmp_path: Path) -> None:
    check(
        tmp_path,
        """
        import sys, types
        import fusedtrain, pytest
        # Modules as small as can be, under the names of those that the stand-in opens late.
        utils = types.ModuleType("fusedtrain.apex.fp16_utils")
        exec("import os\\ndef network_to_half(n): return n\\n_own = 1", vars(utils))
        optimizers = types.ModuleType("fusedtrain.apex.optimizers")
        vars(optimizers).update(__all__=["FusedAdam"], FusedAdam=int, other=3)
        sys.modules[utils.__name__] = utils
        sys.modules[optimizers.__name__] = optimizers
        apex = fusedtrain.apex.install_apex()
        namespace = {}
        exec("from apex.fp16_utils import *", namespace)
        assert namespace["network_to_half"] is utils.network_to_half
        assert "os" not in namespace and "_own" not in namespace
        assert apex.fp16_utils._own == 1  # where it is asked for by name
        exec("from apex.optimizers import FusedAdam; from apex.optimizers import *", namespace)
        assert namespace["FusedAdam"] is int and "other" not in namespace
        apex.amp.initialize
        assert "state_dict" in vars(apex.amp)  # timm looks there
        with pytest.raises(RuntimeError, match="torch._foreach"):
            apex.multi_tensor_apply.multi_tensor_applier(None, None, [], 1.0)
        has = "no apex.optimizers.FusedNothing; apex.optimizers has: FusedAdam"
        with pytest.raises(AttributeError, match=has):
            apex.optimizers.FusedNothing
        """,
    )


def test_what_it_has_not_is_said(tmp_path: Path) -> None:
    check(
        tmp_path,
        """
        import importlib
        import fusedtrain, pytest
        apex = fusedtrain.apex.install_apex()
        has = "amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel"
        for statement, name in {
            "import apex.mlp": "apex.mlp",
            "from apex import contrib": "apex.contrib",
            "import apex.contrib.optimizers": "apex.contrib",
            "importlib.import_module('apex.RNN')": "apex.RNN",
        }.items():
            with pytest.raises(ModuleNotFoundError) as raised:
                exec(statement)
            want = f"fusedtrain's stand-in for Apex has no {name}; apex has: {has}"
            assert str(raised.value) == want, str(raised.value)
        with pytest.raises(ImportError, match="no apex.parallel.Nothing; apex.parallel has: Dist"):
            from apex.parallel import Nothing
        assert not hasattr(apex, "mlp")
        from apex.normalization.fused_layer_norm import FusedLayerNorm
        assert FusedLayerNorm is apex.normalization.FusedLayerNorm
        try:
            import apexes
        except ModuleNotFoundError as error:
            assert "fusedtrain" not in str(error)
        """,
    )


REFUSED = """
import importlib, sys
import fusedtrain, pytest
for path, first, where, left in {cases!r}:
    sys.path.insert(0, path)
    importlib.invalidate_caches()
    exec(first)
    before = list(sys.meta_path)
    with pytest.raises(RuntimeError) as raised:
        fusedtrain.apex.install_apex()
    text = str(raised.value)
    assert where in text and "pip uninstall apex" in text, text
    assert "fusedtrain.apex instead of apex" in text
    assert sys.meta_path == before
    assert [m for m in sys.modules if m.partition(".")[0] == "apex"] == left
    sys.path.remove(path)
"""


def test_an_apex_that_is_there_is_left_alone(tmp_path: Path) -> None:
    real, folder, listed = (tmp_path / name for name in ("real", "folder", "listed"))
    (real / "apex").mkdir(parents=True)
    (real / "apex" / "__init__.py").write_text("number = 1\n")
    (folder / "apex").mkdir(parents=True)  # of a cloned repository: importable, and empty
    (listed / "apex-1.2.dist-info").mkdir(parents=True)
    (listed / "apex-1.2.dist-info" / "METADATA").write_text("Name: apex\nVersion: 1.2\n")
    file = str(real / "apex" / "__init__.py")
    cases = [
        (str(folder), "", str(folder / "apex"), []),
        (str(listed), "", f"{listed}, version 1.2", []),
        (str(real), "", file, []),
        (str(real), "import apex", f"imported already, from {file}", ["apex"]),
    ]
    check(tmp_path, REFUSED.format(cases=cases))


SCRIPT = """
import sys
import torch.multiprocessing as mp
from apex.parallel.LARC import LARC
from neighbour import number

def work(rank, start):
    print("worker", start, LARC.__name__, number, __name__)

if __name__ == "__main__":
    print(__file__, sys.argv, sys.path[0], sys.modules["__main__"].work is work)
    for start in STARTS:
        mp.start_processes(work, (start,), start_method=start)
    sys.exit(3)
"""
STARTS = [start for start in ("spawn", "forkserver") if start in get_all_start_methods()]


def test_a_script_that_is_not_edited(tmp_path: Path) -> None:
    """Processes that it starts import it again, and have the stand-in, too."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(SCRIPT.replace("STARTS", str(STARTS)))
    (scripts / "neighbour.py").write_text("number = 7\n")
    script = os.path.join("scripts", "train.py")
    run = python(tmp_path, "-m", "fusedtrain.apex", script, "--lr", "0.1", "--", "-h")
    assert run.stdout.splitlines() == [
        f"{script} {[script, '--lr', '0.1', '--', '-h']} {scripts.resolve()} True",
        *(f"worker {start} LARC 7 __mp_main__" for start in STARTS),
    ], run.stderr
    assert run.returncode == 3, run.stderr


def test_a_script_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.argv)
    with pytest.raises(SystemExit) as raised:
        main(["nowhere.py", "--lr", "1"])
    assert raised.value.code == 2
    assert "there is no file nowhere.py" in capsys.readouterr().err
    assert sys.argv == before


def test_a_script_beside_an_apex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "apex").mkdir()
    (tmp_path / "train.py").write_text("raise AssertionError")
    assert main([str(tmp_path / "train.py")]) == 1
    assert f"there is an apex already ({tmp_path.resolve() / 'apex'})" in capsys.readouterr().err
    assert "apex" not in sys.modules
