#pragma once

namespace psplus {

/// How the process that a worker starts as psplus-server ends, once the server proper is on its
/// way. Other programs end otherwise, and so are told from it: /bin/true with 0, say.
inline constexpr int kServerStarted = 80;
/// The same when the server proper could not be forked.
inline constexpr int kServerNotForked = 81;

}  // namespace psplus
