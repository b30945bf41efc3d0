#pragma once

#include <span>

#include "base/status.hpp"
#include "store/layout.hpp"
#include "wire/messages.hpp"
#include "worker/dense_stream.hpp"
#include "worker/session.hpp"

namespace psplus::worker {

/// Registers an extent with the server, and the stream with its first one, and waits until this
/// worker counts in it. The first stream of a job waits for WORLD_SIZE workers: kTimeout says how
/// many came and which are missing.
Result<wire::StreamReady> register_extent(Session& session, const StreamOptions& options,
                                          StreamExtent extent, store::Rule rule,
                                          const store::ExtentLayout& layout,
                                          std::span<const std::byte> blob);

}  // namespace psplus::worker
