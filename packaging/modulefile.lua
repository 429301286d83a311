-- An Lmod module file for a folder that scripts/install or the tarball of scripts/package laid out.
-- It puts folders on paths and preloads nothing. Copy it to MODULEPATH as strata/VERSION.lua and set `prefix`.
help([[Strata: NCCL's interface, two-level collectives for thousands of GPUs]])
whatis("Name: strata")
local prefix = "/opt/strata"
prepend_path("PATH", pathJoin(prefix, "bin"))
prepend_path("CPATH", pathJoin(prefix, "include"))
prepend_path("LIBRARY_PATH", pathJoin(prefix, "lib"))
prepend_path("PKG_CONFIG_PATH", pathJoin(prefix, "lib", "pkgconfig"))
setenv("STRATA_LIBRARY", pathJoin(prefix, "lib", "libstrata.so"))
