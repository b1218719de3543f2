// What bind_nccl says without NCCL, with one that is too old, with one that will do, and with two at once. A process can't be
// sure to unload what it has loaded, so each case runs in a child: nccl_test TEXT [LIBRARY ...], TEXT from the message or
// "bound".
#include "team/nccl.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "check.h"

namespace {

std::string self;

void look(std::string const& wanted, int libraries, char** paths) {
  for (int i = 0; i < libraries; ++i) CHECK_THAT(dlopen(paths[i], RTLD_NOW) != nullptr, paths[i]);
  std::string why;
  entwine::team::Nccl const* nccl = entwine::team::bind_nccl(&why);
  if (wanted != "bound") {
    CHECK_THAT(nccl == nullptr && why.find(wanted) != std::string::npos, "wanted '" << wanted << "' in '" << why << "'");
    return;
  }
  CHECK_THAT(nccl != nullptr, why);
  if (nccl == nullptr) return;
  int rank = 0, team = 0;
  CHECK_THAT(nccl->version == 22809 && nccl->peer_pointer == nullptr, nccl->version);
  CHECK_THAT(nccl->comm_user_rank(&team, &rank) == 0 && rank == 1, rank);
}

void child(std::string const& arguments) {
  int status = std::system(("'" + self + "' " + arguments).c_str());
  CHECK_THAT(status == 0, arguments);
}

void none() { child("'no NCCL is loaded'"); }
void too_old() {
  child("'NCCL 2.27.5 at' " FAKE_NCCL_OLD);
  child("'is too old: 2.28.0 or newer' " FAKE_NCCL_OLD);
}
void new_enough() { child("bound " FAKE_NCCL_NEW); }
void two() { child("'loaded more than once' " FAKE_NCCL_OLD " " FAKE_NCCL_NEW); }

}  // namespace

int main(int argc, char** argv) {
  self = argv[0];
  if (argc == 1) return check::run({{"none", none}, {"too old", too_old}, {"new enough", new_enough}, {"two", two}});
  look(argv[1], argc - 2, argv + 2);
  return check::failures != 0;
}
