"""Lets SGLang import on a machine without CUDA. Found by Python because this folder is on PYTHONPATH.

sgl_kernel        every name in it exists and raises when it is *called* (its wheels on PyPI are CUDA only)
torchvision       imports without its compiled half, when that half was built for another torch than the one here
pool_host.*       get the host<->device copies that are missing on a CPU, see sgl_cpu.py
lora              asks for pinned memory, and gets plain one
deepseek_common   takes the form of latent attention that a CPU's attention backend can compute
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import pathlib
import re
import sys
import types


class Missing:
    """Stands for a function, class or operator that this machine cannot have."""

    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} needs a GPU; this process runs on the CPU shim")


class MissingModule(types.ModuleType):
    __path__ = ()
    __version__ = "0.4.10"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MissingModule(spec.name)

    def exec_module(self, module):
        pass


class TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Declares the operators whose fake versions torchvision registers at import."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return
        sys.meta_path.remove(self)

        def build(package):
            return importlib.metadata.version(package).partition("+")[2]

        if build("torch") != build("torchvision"):
            import torch

            spec = importlib.machinery.PathFinder.find_spec("torchvision")
            text = (pathlib.Path(spec.origin).parent / "_meta_registrations.py").read_text()
            names = re.findall(r'register_meta\("(\w+)"', text) + re.findall(r"torchvision::(\w+)", text)
            TorchvisionFinder.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in sorted(set(names)):
                TorchvisionFinder.library.define(operator + "(Tensor a) -> Tensor")
        return


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs sgl_cpu.NAME(module) when a module of SGLang has been executed."""

    def __init__(self, hooks):
        self.hooks = dict(hooks)

    def find_spec(self, name, path=None, target=None):
        hook = self.hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            import sgl_cpu

            getattr(sgl_cpu, hook)(module)

        spec.loader.exec_module = exec_module
        return spec


POOLS = "sglang.srt.mem_cache.pool_host."
sys.meta_path[:0] = [
    KernelFinder(),
    TorchvisionFinder(),
    AfterImport(
        {
            POOLS + "base": "host_memory",
            POOLS + "common": "pinning",
            POOLS + "mha": "copies",
            POOLS + "mla": "copies",
            "sglang.srt.lora.layers": "plain_memory",
            "sglang.srt.models.deepseek_common.attention_backend_handler": "latent_attention",
        }
    ),
]
