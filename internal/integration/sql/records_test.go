package sql_test

import (
	"context"
	"errors"
	"testing"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// A service that claims and one that only cleans lock the same table, though only the first has checked it.
func TestCleanersOfClaimingAndOtherProcessesYield(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		db.Repository(t, inboxsql.Options{})
		other, err := db.BeginTx(context.Background(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = other.Rollback() }()
		query := db.Adapter.CleanerLockQuery(inboxsql.CheckParams{Table: tableOf(t, db)})
		var locked int
		if err := other.QueryRow(query.Query).Scan(&locked); err != nil || locked != 1 {
			t.Fatalf("%d, %v", locked, err)
		}
		onlyCleans := db.RepositoryWithoutSchema(t, inboxsql.Options{})
		if _, err := onlyCleans.DeleteProcessed(context.Background(), "c", time.Hour, 1); !errors.Is(err, inbox.ErrCleaning) {
			t.Errorf("the error is %v, want ErrCleaning", err)
		}
	})
}

// Whatever is done to the search path, a cleaner's table is the one that it has begun with.
func TestRecordsAreThoseOfOneTable(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.Repository(t, inboxsql.Options{})
	addExpired(t, db, "c", 3)
	repository := db.RepositoryWithoutSchema(t, inboxsql.Options{})
	db.SetMaxOpenConns(1)
	if consumers, _, err := repository.Consumers(context.Background()); err != nil || len(consumers) != 1 {
		t.Fatalf("%q, %v", consumers, err)
	}
	db.MustExec(t, `SET search_path TO pg_catalog`)
	if deleted, err := repository.DeleteProcessed(context.Background(), "c", time.Hour, 10); err != nil || deleted != 3 {
		t.Errorf("%d deleted, %v", deleted, err)
	}
}
