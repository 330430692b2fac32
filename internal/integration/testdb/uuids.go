package testdb

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// Partitioned makes the database's inbox a partitioned one, with a few partitions, before there is a table.
func (d *Database) Partitioned(t testing.TB, options inboxsql.PartitionsOptions) *inboxsql.Partitions {
	t.Helper()
	if options.IDs == 0 {
		options.IDs = inboxsql.UUIDv7
	}
	if options.Retention == 0 {
		options.Retention = 24 * time.Hour
	}
	if options.Ahead == 0 {
		options.Ahead = 24 * time.Hour
	}
	d.Adapter = inboxsql.PartitionedPostgreSQLSchema{IDs: options.IDs}
	partitions, err := inboxsql.NewPartitions(d.DB, options)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := partitions.Pass(context.Background()); err != nil {
		t.Fatal(err)
	}
	return partitions
}

// ID is the n-th id of the time's millisecond.
func ID(kind inboxsql.IDKind, at time.Time, n int) string {
	bound := kind.Bound(at)
	digits := fmt.Sprintf("%09d", n)
	return bound[:len(bound)-len(digits)] + digits
}

// UUIDs makes the subject's repository take UUIDv7s where the kit has any texts, in the same order as far as
// the kit looks at it.
func UUIDs(subject inboxtest.Subject) inboxtest.Subject {
	u := &uuids{Repository: subject.Repository, uuids: map[string]string{}, texts: map[string]string{}}
	age := subject.Age
	subject.Repository = u
	subject.Age = func(ctx context.Context, key inbox.Key, by time.Duration) error { return age(ctx, u.key(key), by) }
	return subject
}

type uuids struct {
	inbox.Repository
	mutex        sync.Mutex
	uuids, texts map[string]string
}

func (u *uuids) key(key inbox.Key) inbox.Key {
	if key.MessageID == "" {
		return key // the beginning of a list
	}
	u.mutex.Lock()
	defer u.mutex.Unlock()
	uuid, ok := u.uuids[key.MessageID]
	if !ok {
		start := (key.MessageID + strings.Repeat("\x00", 4))[:4]
		uuid = inboxsql.UUIDv7.Bound(time.Now().Truncate(time.Hour))
		uuid = fmt.Sprintf("%s-%x%04x", uuid[:23], start, len(u.uuids))
		u.uuids[key.MessageID], u.texts[uuid] = uuid, key.MessageID
	}
	key.MessageID = uuid
	return key
}

func (u *uuids) Claim(ctx context.Context, key inbox.Key) (inbox.Transaction, *inbox.Record, error) {
	return u.Repository.Claim(ctx, u.key(key))
}

func (u *uuids) MarkSent(ctx context.Context, keys []inbox.Key) error {
	inner := make([]inbox.Key, len(keys))
	for i, key := range keys {
		inner[i] = u.key(key)
	}
	return u.Repository.MarkSent(ctx, inner)
}

func (u *uuids) ListUnsent(ctx context.Context, age time.Duration, after inbox.Key, limit int, each func(inbox.Key, inbox.Record)) error {
	return u.Repository.(interface {
		ListUnsent(context.Context, time.Duration, inbox.Key, int, func(inbox.Key, inbox.Record)) error
	}).ListUnsent(ctx, age, u.key(after), limit, func(key inbox.Key, record inbox.Record) {
		u.mutex.Lock()
		key.MessageID = u.texts[key.MessageID]
		u.mutex.Unlock()
		each(key, record)
	})
}
