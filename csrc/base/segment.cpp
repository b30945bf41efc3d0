#include "base/segment.hpp"

#include <cerrno>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/format.hpp"
#include "base/memory_limits.hpp"

namespace psplus {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

Result<Segment> Segment::create(std::string_view label, std::size_t size) {
  if (Status room = check_memory_available(label, size); !room.ok()) return room;
  UniqueFd fd{::memfd_create(std::string(label).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (!fd) return Status::from_errno("memfd_create", label, errno);
  // Pages are reserved now: ftruncate alone leaves holes, and a full machine would raise SIGBUS at
  // the first push instead of an error here.
  int err = EINTR;
  while (err == EINTR) err = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(size));
  if (err != 0)
    return Status::from_errno("posix_fallocate", formatted("{} ({} bytes)", label, size), err);
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0)
    return Status::from_errno("F_ADD_SEALS", label, errno);
  auto mapping = UniqueMapping::map_shared(fd, size, Access::kReadWrite);
  if (!mapping.ok()) return mapping.status();
  return Segment{std::move(fd), std::move(mapping).value()};
}

Result<Segment> Segment::map(UniqueFd fd, std::size_t minimum_size, Access access) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
    return Status{StatusCode::kInternal, "a received segment is not a memfd of sealed size"};
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return Status::from_errno("fstat", "a segment", errno);
  const auto size = static_cast<std::size_t>(info.st_size);
  if (size < minimum_size || size == 0)
    return Status{
        StatusCode::kInternal,
        formatted("a received segment has {} bytes, expected at least {}", size, minimum_size)};
  auto mapping = UniqueMapping::map_shared(fd, size, access);
  if (!mapping.ok()) return mapping.status();
  return Segment{std::move(fd), std::move(mapping).value()};
}

}  // namespace psplus
