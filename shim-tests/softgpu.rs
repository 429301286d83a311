//! The soft GPU by itself: that what is not synchronised goes wrong with it, and the rest does not.

mod soft;

#[test]
fn it_builds() {
    soft::cuda_dir();
}
