package pgx_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	"github.com/devmappa/watermill-inbox/partitions"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

func TestPartitionedRepository(t *testing.T) {
	t.Parallel()
	inboxtest.TestRepository(t, inboxtest.RepositoryFeatures{FailedStatementBreaksTransaction: true}, func(t *testing.T) inboxtest.RepositorySubject {
		db := newDatabase(t, func(config *pgxpool.Config) { config.MaxConns = 8 })
		db.Partitioned(t, partitions.Options{})
		return testdb.UUIDs(db.subject(t, inboxpgx.Options{IDs: inbox.UUIDv7}))
	})
}

// The same errors as through database/sql, with one connection, and partitions made through the pool itself.
func TestPartitionedErrors(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, oneConnection)
	beside := stdlib.OpenDBFromPool(db.pool)
	defer beside.Close()
	keeper, err := partitions.New(beside, partitions.Options{IDs: inbox.ULID, Retention: 24 * time.Hour, Ahead: 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if done, err := keeper.Pass(context.Background()); err != nil || len(done.Created) != 2 {
		t.Fatalf("%+v, %v", done, err)
	}
	repository := db.repository(t, inboxpgx.Options{IDs: inbox.ULID})
	today := time.Now().UTC().Truncate(24 * time.Hour)
	for name, c := range map[string]struct {
		id        string
		want      error
		permanent bool
	}{
		"a UUIDv7":           {inbox.UUIDv7.Bound(time.Now()), inbox.ErrInvalidKey, true},
		"lower case":         {strings.ToLower(testdb.ID(inbox.ULID, time.Now(), 1)), inbox.ErrInvalidKey, true},
		"too old":            {testdb.ID(inbox.ULID, today.AddDate(0, 0, -1).Add(-time.Millisecond), 999999999), inbox.ErrTooOld, true},
		"at the lowest":      {inbox.ULID.Bound(today.AddDate(0, 0, -1)), nil, false},
		"below the highest":  {testdb.ID(inbox.ULID, today.AddDate(0, 0, 2).Add(-time.Millisecond), 999999999), nil, false},
		"at the highest":     {inbox.ULID.Bound(today.AddDate(0, 0, 2)), partitions.ErrNoPartition, false},
		"at the epoch":       {inbox.ULID.Bound(time.UnixMilli(0)), inbox.ErrTooOld, true},
		"in the year 10889":  {"7ZZZZZZZZZZZZZZZZZZZZZZZZZ", partitions.ErrNoPartition, false},
		"now":                {testdb.ID(inbox.ULID, time.Now(), 1), nil, false},
		"more than 128 bits": {"8ZZZZZZZZZZZZZZZZZZZZZZZZZ", inbox.ErrInvalidKey, true},
	} {
		transaction, record, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: c.id}})
		if err == nil {
			err = transaction.Commit(context.Background())
		}
		if !errors.Is(err, c.want) || record != nil {
			t.Errorf("%s: %v, %v, want %v", name, record, err, c.want)
		}
		if err != nil && inbox.ShouldPoison(&inbox.Error{Step: "claim", Err: err}) != c.permanent {
			t.Errorf("%s: it would be poisoned or not, wrongly: %v", name, err)
		}
	}
	db.MustExec(t, `ALTER TABLE watermill_inbox ADD CONSTRAINT mine CHECK (consumer <> 'x')`)
	_, _, err = repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "x", MessageID: testdb.ID(inbox.ULID, time.Now(), 2)}})
	if err == nil || !strings.Contains(err.Error(), "mine") || errors.Is(err, inbox.ErrTooOld) || errors.Is(err, partitions.ErrNoPartition) {
		t.Errorf("a constraint of the user's: %v", err)
	}
	other, err := inboxpgx.NewRepository(db.pool, inboxpgx.Options{IDs: inbox.UUIDv7})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Check(context.Background()); err == nil || !strings.Contains(err.Error(), "ids of another kind") {
		t.Errorf("a service with the other kind: %v", err)
	}
	wantIdle(t, db.pool)
}
