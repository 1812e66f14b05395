"""Structs that kernels take as arguments, as they are."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder


trait KernelArgument(DevicePassable):
    """A struct whose bytes are the same on the host and on the device."""

    comptime device_type: AnyType = Self
    """What the kernel sees."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in messages about the arguments of a kernel.

        Returns:
            The name.
        """
        return "KernelArgument"
