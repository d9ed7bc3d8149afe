// Where libimbrex.so is: IMBREX_LIB_DIR, or where the linker looks anyway.
fn main() {
    println!("cargo:rerun-if-env-changed=IMBREX_LIB_DIR");
    if let Ok(dir) = std::env::var("IMBREX_LIB_DIR") {
        println!("cargo:rustc-link-search=native={dir}");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{dir}");
    }
    println!("cargo:rustc-link-lib=dylib=imbrex");
}
