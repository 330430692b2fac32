package testdb

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
	"github.com/devmappa/watermill-inbox/partitions"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// Partitioned makes the database's inbox a partitioned one, with a few partitions, before there is a table.
func (d *Database) Partitioned(t testing.TB, options partitions.Options) *partitions.Partitions {
	t.Helper()
	if options.IDs == 0 {
		options.IDs = inbox.UUIDv7
	}
	if options.Retention == 0 {
		options.Retention = 24 * time.Hour
	}
	if options.Ahead == 0 {
		options.Ahead = 24 * time.Hour
	}
	d.Adapter = inboxsql.PartitionedPostgreSQLSchema{IDs: options.IDs}
	partitions, err := partitions.New(d.DB, options)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := partitions.Pass(context.Background()); err != nil {
		t.Fatal(err)
	}
	return partitions
}

// ID is the n-th id of the time's millisecond.
func ID(kind inbox.IDKind, at time.Time, n int) string {
	bound := kind.Bound(at)
	digits := fmt.Sprintf("%09d", n)
	return bound[:len(bound)-len(digits)] + digits
}

// UUIDs makes the subject's repository take UUIDv7s where the kit has any texts, in the same order as far as
// the kit looks at it.
func UUIDs(subject inboxtest.RepositorySubject) inboxtest.RepositorySubject {
	u := &uuids{repository: subject.Repository.(repository), uuids: map[string]string{}, texts: map[string]string{}}
	age := subject.Age
	subject.Repository = u
	subject.Age = func(ctx context.Context, key inbox.Key, by time.Duration) error { return age(ctx, u.key(key), by) }
	return subject
}

type uuids struct {
	repository
	mutex        sync.Mutex
	uuids, texts map[string]string
}

type repository interface {
	inbox.Repository
	inbox.Looker
	inbox.Records
}

func (u *uuids) key(key inbox.Key) inbox.Key {
	if key.MessageID == "" {
		return key // the beginning of a list
	}
	u.mutex.Lock()
	defer u.mutex.Unlock()
	uuid, ok := u.uuids[key.MessageID]
	if !ok {
		// Most of the kit's ids are numbers behind a word, and there is not room for all of a text.
		start := key.MessageID
		if number, found := strings.CutPrefix(start, "message-"); found {
			start = "m" + number
		}
		start = (start + strings.Repeat("\x00", 4))[:4]
		uuid = inbox.UUIDv7.Bound(time.Now().Truncate(time.Hour))
		uuid = fmt.Sprintf("%s-%x%04x", uuid[:23], start, len(u.uuids))
		u.uuids[key.MessageID], u.texts[uuid] = uuid, key.MessageID
	}
	key.MessageID = uuid
	return key
}

func (u *uuids) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	params.Key = u.key(params.Key)
	transaction, record, err := u.repository.Claim(ctx, params)
	if record != nil {
		record.Key = u.text(record.Key)
	}
	return transaction, record, err
}

func (u *uuids) MarkSent(ctx context.Context, records []inbox.Record) ([]inbox.Record, error) {
	locked, err := u.repository.MarkSent(ctx, u.found(records))
	return u.given(locked), err
}

func (u *uuids) DeleteRecords(ctx context.Context, found []inbox.Record) (int, error) {
	return u.repository.DeleteRecords(ctx, u.found(found))
}

func (u *uuids) DeleteUnsent(ctx context.Context, found []inbox.Record) (int, error) {
	return u.repository.DeleteUnsent(ctx, u.found(found))
}

func (u *uuids) CountRecords(ctx context.Context, selection inbox.Selection) (int, error) {
	return u.repository.CountRecords(ctx, u.selection(selection))
}

func (u *uuids) FindRecords(ctx context.Context, selection inbox.Selection, after inbox.Record, limit int) ([]inbox.Record, error) {
	after.Key = u.key(after.Key)
	found, err := u.repository.FindRecords(ctx, u.selection(selection), after, limit)
	return u.given(found), err
}

func (u *uuids) LeaseUnsent(ctx context.Context, selection inbox.Selection, after inbox.Record, limit int, lease time.Duration) ([]inbox.Record, error) {
	after.Key = u.key(after.Key)
	found, err := u.repository.LeaseUnsent(ctx, u.selection(selection), after, limit, lease)
	return u.given(found), err
}

func (u *uuids) Look(ctx context.Context, params inbox.ClaimParams) (*inbox.Record, error) {
	params.Key = u.key(params.Key)
	record, err := u.repository.Look(ctx, params)
	if record != nil {
		record.Key = u.text(record.Key)
	}
	return record, err
}

func (u *uuids) text(key inbox.Key) inbox.Key {
	u.mutex.Lock()
	defer u.mutex.Unlock()
	key.MessageID = u.texts[key.MessageID]
	return key
}

func (u *uuids) selection(selection inbox.Selection) inbox.Selection {
	selection.MessageID = u.key(inbox.Key{MessageID: selection.MessageID}).MessageID
	return selection
}

func (u *uuids) found(found []inbox.Record) []inbox.Record {
	inner := slices.Clone(found)
	for i := range inner {
		inner[i].Key = u.key(inner[i].Key)
	}
	return inner
}

// given are the records under the kit's keys.
func (u *uuids) given(records []inbox.Record) []inbox.Record {
	for i := range records {
		records[i].Key = u.text(records[i].Key)
	}
	return records
}
