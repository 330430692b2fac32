//go:build unix

package servers

import (
	"os"
	"path/filepath"
	"testing"
)

func TestReplaceFileRestoresWhatWasThere(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "policy-rc.d")
	if err := os.WriteFile(path, []byte("theirs"), 0o640); err != nil {
		t.Fatal(err)
	}
	restore, err := replaceFile(path, "ours", 0o755)
	if err != nil {
		t.Fatal(err)
	}
	assertFile(t, path, "ours", 0o755)
	if err := restore(); err != nil {
		t.Fatal(err)
	}
	assertFile(t, path, "theirs", 0o640)
}

func TestReplaceFileRemovesWhatWasNotThere(t *testing.T) {
	root := t.TempDir()
	top := filepath.Join(root, "etc")
	path := filepath.Join(top, "some.d", "ours.conf")
	restore, err := replaceFile(path, "ours", 0o644)
	if err != nil {
		t.Fatal(err)
	}
	assertFile(t, path, "ours", 0o644)
	if err := restore(); err != nil {
		t.Fatal(err)
	}
	if exists(top) || !exists(root) {
		t.Error("the folders made are still there, or more than those are gone")
	}
}

func TestReplaceFileKeepsFoldersThatAreInUse(t *testing.T) {
	top := filepath.Join(t.TempDir(), "etc")
	restore, err := replaceFile(filepath.Join(top, "some.d", "ours.conf"), "ours", 0o644)
	if err != nil {
		t.Fatal(err)
	}
	theirs := filepath.Join(top, "theirs.conf")
	if err := os.WriteFile(theirs, []byte("theirs"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := restore(); err != nil {
		t.Fatal(err)
	}
	assertFile(t, theirs, "theirs", 0o600)
}

func assertFile(t *testing.T, path, content string, mode os.FileMode) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != content || info.Mode().Perm() != mode {
		t.Errorf("%s is %q with mode %o, want %q with %o", path, got, info.Mode().Perm(), content, mode)
	}
}
