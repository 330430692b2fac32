//go:build unix

package servers

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestSweepTakesOnlyWhatHasNoOwner(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	alive, err := newFolder(KindPostgreSQL, nil)
	if err != nil {
		t.Fatal(err)
	}
	dead, err := newFolder(KindRabbitMQ, nil)
	if err != nil {
		t.Fatal(err)
	}
	dead.lock.Close() // as the system does when the owner is killed
	unlocked := filepath.Join(os.TempDir(), folderPrefix+"being-made")
	if err := os.Mkdir(unlocked, 0o700); err != nil {
		t.Fatal(err)
	}

	next, err := newFolder(KindRabbitMQ, nil)
	if err != nil {
		t.Fatal(err)
	}
	if exists(dead.path) {
		t.Error("the folder of a dead owner is still there")
	}
	for _, path := range []string{alive.path, unlocked, next.path} {
		if !exists(path) {
			t.Errorf("%s was removed", path)
		}
	}
	for _, f := range []*folder{alive, next} {
		if err := f.remove(); err != nil || exists(f.path) {
			t.Errorf("remove(): %v", err)
		}
	}
}

func TestFolderParentMustBeReachable(t *testing.T) {
	private := filepath.Join(t.TempDir(), "private")
	if err := os.MkdirAll(filepath.Join(private, "tmp"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(private, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", filepath.Join(private, "tmp"))
	if got, err := folderParent(nil); err != nil || got != os.TempDir() {
		t.Errorf("for ourselves: %q, %v", got, err)
	}
	if got, err := folderParent(&syscall.Credential{Uid: 1}); err == nil && !reachable(got) {
		t.Errorf("for another user: %q", got)
	}
}

func TestLogTail(t *testing.T) {
	f := &folder{path: t.TempDir()}
	if err := f.logTail(); err != nil {
		t.Errorf("without a log: %v", err)
	}
	if err := os.WriteFile(f.join("log"), []byte("one\ntwo\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := f.logTail(); err == nil || err.Error() != "the end of its log:\none\ntwo" {
		t.Errorf("logTail() = %v", err)
	}
}
