# Builds on x86-64 for aarch64 and runs its tests under qemu: Debian's g++-aarch64-linux-gnu and
# qemu-user-static. Headers without code of their own ({fmt}, spdlog) are the build machine's.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L /usr/aarch64-linux-gnu)
