// A host whose ggml is another one: loads a backend as ggml does, with stand-ins for the two libraries
// of ggml, and says what came of it.
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    printf("not loaded: %s\n", dlerror());
    return 3;
  }
  void* (*init)(void) = (void* (*)(void))dlsym(library, "ggml_backend_init");
  if (init == NULL) return 4;
  puts(init() == NULL ? "refused" : "accepted");
  return 0;
}
