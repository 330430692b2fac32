//go:build unix

package servers

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// folderPrefix begins the name of every folder that this package makes.
const folderPrefix = "watermill-inbox-"

// lockName is the file that the owner of a folder keeps locked. The system
// releases it when the owner dies, however that happens.
const lockName = "owner.lock"

// folder is the temporary folder of one private server.
type folder struct {
	path string
	lock *os.File
}

// newFolder makes a folder for a server that will run as owner, nil for
// ourselves. First it removes what killed owners have left.
func newFolder(kind Kind, owner *syscall.Credential) (*folder, error) {
	parent, err := folderParent(owner)
	if err != nil {
		return nil, err
	}
	sweep(parent)
	path, err := os.MkdirTemp(parent, folderPrefix+string(kind)+"-")
	if err != nil {
		return nil, fmt.Errorf("servers: %w", err)
	}
	f := &folder{path: path}
	if err := f.claim(owner); err != nil {
		return nil, errors.Join(fmt.Errorf("servers: %w", err), f.remove())
	}
	return f, nil
}

// claim locks the folder and hands it to the server's user.
func (f *folder) claim(owner *syscall.Credential) error {
	// Locked under another name and then renamed: a sweep never sees the lock
	// file of a living owner unlocked.
	fresh := f.join(lockName + ".new")
	lock, err := os.Create(fresh)
	if err != nil {
		return err
	}
	f.lock = lock
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	if err := os.Rename(fresh, f.join(lockName)); err != nil {
		return err
	}
	if owner == nil {
		return nil
	}
	return os.Chown(f.path, int(owner.Uid), int(owner.Gid))
}

// join is the path of something in the folder.
func (f *folder) join(elements ...string) string {
	return filepath.Join(append([]string{f.path}, elements...)...)
}

// remove deletes the folder and lets go of its lock.
func (f *folder) remove() error {
	err := os.RemoveAll(f.path)
	if f.lock != nil {
		f.lock.Close()
	}
	return err
}

// sweep removes the folders in parent whose owner is gone. It is a courtesy:
// what it cannot remove, the next sweep tries again.
func sweep(parent string) {
	locks, _ := filepath.Glob(filepath.Join(parent, folderPrefix+"*", lockName))
	for _, path := range locks {
		lock, err := os.Open(path)
		if err != nil {
			continue
		}
		if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			os.RemoveAll(filepath.Dir(path))
		}
		lock.Close()
	}
}

// folderParent picks the folder in which the server's folder is made: the
// system's temporary folder unless another user has to get there and cannot.
func folderParent(owner *syscall.Credential) (string, error) {
	candidates := []string{os.TempDir()}
	if owner != nil {
		candidates = append(candidates, "/tmp", "/var/tmp")
	}
	for _, candidate := range candidates {
		absolute, err := filepath.Abs(candidate)
		if err == nil && (owner == nil || reachable(absolute)) {
			return absolute, nil
		}
	}
	return "", fmt.Errorf("servers: no temporary folder that another user can reach, tried %s", strings.Join(slices.Compact(candidates), ", "))
}

// reachable reports whether every user may pass through path and all above it.
func reachable(path string) bool {
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm()&fs.FileMode(0o001) == 0 {
		return false
	}
	return path == "/" || reachable(filepath.Dir(path))
}
