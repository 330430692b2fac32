package sql_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	"github.com/devmappa/watermill-inbox/internal/integration/testproxy"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// Check takes a table whose columns ignore the case when its key does not; then nothing else may.
func TestSQLiteRecordsCompareBytesUnderAnyCollation(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t)
	db.MustExec(t, `CREATE TABLE watermill_inbox (consumer text NOT NULL COLLATE NOCASE, message_id text NOT NULL COLLATE NOCASE,
		processed_at integer NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)))`)
	db.MustExec(t, `CREATE UNIQUE INDEX inbox_key ON watermill_inbox (consumer COLLATE BINARY, message_id COLLATE BINARY)`)
	db.MustExec(t, `CREATE TABLE watermill_inbox_unsent (consumer text NOT NULL COLLATE NOCASE, message_id text NOT NULL COLLATE NOCASE, claimed_at integer NOT NULL,
		stored_at integer NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)), leased_until integer, topic text NOT NULL, produced blob NOT NULL,
		PRIMARY KEY (consumer COLLATE BINARY, message_id COLLATE BINARY, claimed_at))`)
	repository := db.RepositoryWithoutSchema(t, inboxsql.Options{})
	ctx := context.Background()
	if err := repository.Check(ctx); err != nil {
		t.Fatal(err)
	}
	reset := func() {
		db.MustExec(t, `DELETE FROM watermill_inbox`)
		db.MustExec(t, `DELETE FROM watermill_inbox_unsent`)
		for _, consumer := range []string{"c", "C"} {
			for _, id := range []string{"m", "M"} {
				db.MustExec(t, `INSERT INTO watermill_inbox (consumer, message_id) VALUES ($1, $2)`, consumer, id)
			}
		}
		// At one time, so that only the names tell them apart.
		db.MustExec(t, `UPDATE watermill_inbox SET processed_at = (SELECT max(processed_at) FROM watermill_inbox)`)
		db.MustExec(t, `INSERT INTO watermill_inbox_unsent (consumer, message_id, claimed_at, topic, produced)
			SELECT consumer, message_id, processed_at, 'events', CAST(consumer || message_id AS blob) FROM watermill_inbox`)
	}
	left := func(want int) {
		t.Helper()
		if got := db.Count(t, `SELECT count(*) FROM watermill_inbox WHERE consumer || message_id <> 'cm' COLLATE BINARY`); got != want {
			t.Errorf("%d records of other keys are left, want %d", got, want)
		}
	}
	key := inbox.Key{Consumer: "c", MessageID: "m"}

	reset()
	if consumers, _, err := repository.Consumers(ctx); err != nil || len(consumers) != 2 {
		t.Errorf("consumers %q, %v", consumers, err)
	}
	if statistics, err := repository.Statistics(ctx, inbox.AllConsumers()); err != nil || len(statistics.Consumers) != 2 {
		t.Errorf("statistics %+v, %v", statistics, err)
	}
	if count, err := repository.CountRecords(ctx, inbox.Selection{Consumer: "c", MessageID: "m"}); err != nil || count != 1 {
		t.Errorf("%d are counted, %v", count, err)
	}
	for _, unsent := range []bool{false, true} {
		for after, n := (inbox.Record{}), 0; ; n++ {
			page, err := repository.FindRecords(ctx, inbox.Selection{Unsent: unsent}, after, 1)
			if err != nil {
				t.Fatal(err)
			}
			if len(page) == 0 {
				if n != 4 {
					t.Errorf("%d pages, want 4", n)
				}
				break
			}
			after = page[0]
			if string(after.Produced) != after.Key.Consumer+after.Key.MessageID {
				t.Errorf("unsent %v: the messages of %s are %q", unsent, after.Key, after.Produced)
			}
		}
	}
	record, err := repository.Look(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "C", MessageID: "m"}})
	if err != nil || record == nil || string(record.Produced) != "Cm" {
		t.Errorf("the record is %+v, %v", record, err)
	}
	leased, err := repository.LeaseUnsent(ctx, inbox.Selection{Consumer: "c", MessageID: "M", Unsent: true}, inbox.Record{}, 5, time.Hour)
	if err != nil || len(leased) != 1 || string(leased[0].Produced) != "cM" {
		t.Errorf("leased are %+v, %v", leased, err)
	}
	found, err := repository.FindRecords(ctx, inbox.Selection{Consumer: key.Consumer, MessageID: key.MessageID}, inbox.Record{}, 2)
	if err != nil || len(found) != 1 {
		t.Fatalf("found %v, %v", found, err)
	}
	if locked, err := repository.MarkSent(ctx, found); err != nil || len(locked) != 0 {
		t.Errorf("%v are locked, %v", locked, err)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox_unsent WHERE consumer || message_id <> 'cm' COLLATE BINARY`); got != 3 {
		t.Errorf("the stored messages of %d other records are left, want 3", got)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox_unsent`); got != 3 {
		t.Errorf("the stored messages of %d records are left, want 3", got)
	}

	if deleted, err := inbox.Forget(ctx, repository, inbox.Selection{Consumer: "c", MessageID: "m"}, 1); err != nil || deleted != 1 {
		t.Errorf("%d forgotten, %v", deleted, err)
	}
	left(3)
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox_unsent`); got != 3 {
		t.Errorf("the stored messages of %d records are left, want 3", got)
	}

	reset()
	if deleted, err := repository.DeleteUnsent(ctx, found); err != nil || deleted != 0 {
		t.Errorf("%d deleted of a record that was claimed at another time, %v", deleted, err)
	}
	found, err = repository.FindRecords(ctx, inbox.Selection{Consumer: key.Consumer, MessageID: key.MessageID}, inbox.Record{}, 2)
	if err != nil {
		t.Fatal(err)
	}
	if deleted, err := repository.DeleteUnsent(ctx, found); err != nil || deleted != 1 {
		t.Errorf("%d deleted, %v", deleted, err)
	}
	left(3)
	if err := db.Age(ctx, key, 2*time.Hour); err != nil {
		t.Fatal(err)
	}
	db.MustExec(t, `UPDATE watermill_inbox SET processed_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) WHERE consumer || message_id <> 'cm' COLLATE BINARY`)
	if deleted, _, err := repository.DeleteProcessed(ctx, inbox.DeleteProcessedParams{Consumer: "c", Before: time.Now().Add(-time.Hour), Limit: 10}); err != nil || deleted != 1 {
		t.Errorf("%d deleted, %v", deleted, err)
	}
	left(3)
}

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
		query := dialect.PostgreSQL{}.CleanerLock(tableOf(t, db))
		var locked int
		if err := other.QueryRow(query.Text).Scan(&locked); err != nil || locked != 1 {
			t.Fatalf("%d, %v", locked, err)
		}
		onlyCleans := db.RepositoryWithoutSchema(t, inboxsql.Options{})
		if _, _, err := onlyCleans.DeleteProcessed(context.Background(), inbox.DeleteProcessedParams{Consumer: "c", Before: time.Now().Add(-time.Hour), Limit: 1}); !errors.Is(err, inbox.ErrCleaning) {
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
	if deleted, _, err := repository.DeleteProcessed(context.Background(), inbox.DeleteProcessedParams{Consumer: "c", Before: time.Now().Add(-time.Hour), Limit: 10}); err != nil || deleted != 3 {
		t.Errorf("%d deleted, %v", deleted, err)
	}
}

// No statement on single records, and no batch of a cleaner, reads the whole table.
func TestSQLiteStatementsUseTheIndexes(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t)
	db.Repository(t, inboxsql.Options{})
	table, err := dialect.ParseTable("")
	if err != nil {
		t.Fatal(err)
	}
	found := []inbox.Record{{Key: inbox.Key{Consumer: "c", MessageID: "1"}}, {Key: inbox.Key{Consumer: "c", MessageID: "2"}}}
	text := dialect.SQLite{}
	for _, query := range []dialect.Query{
		text.Consumers(table),
		text.DeleteProcessed(table, inbox.DeleteProcessedParams{Consumer: "c", Before: time.Now().Add(-time.Hour), Limit: 1}),
		text.Count(table, inbox.Selection{Consumer: "c", OlderThan: time.Hour, Unsent: true}),
		text.Record(table, found[0].Key),
		text.Find(table, inbox.Selection{Consumer: "c"}, inbox.Record{}, 1),
		text.Find(table, inbox.Selection{Consumer: "c", Unsent: true}, inbox.Record{}, 1),
		text.LeaseUnsent(table, inbox.Selection{Consumer: "c", Unsent: true}, inbox.Record{}, 1, time.Hour),
		text.Store(table, found[0].Key, inbox.StoreParams{}, false),
		text.DeleteRecords(table, found),
		text.DeleteUnsent(table, found),
		text.MarkSent(table, found),
	} {
		rows, err := db.Query(`EXPLAIN QUERY PLAN `+query.Text, query.Args...)
		if err != nil {
			t.Fatal(err)
		}
		for rows.Next() {
			var step string
			if err := rows.Scan(new(int), new(int), new(int), &step); err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(step, "SCAN watermill_inbox") || strings.HasPrefix(step+" ", "SCAN record ") || strings.HasPrefix(step+" ", "SCAN unsent ") {
				t.Errorf("%s in %s", step, query.Text)
			}
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

// When the answer of a deletion is lost it is not repeated, by which it would be taken for one of nothing: Forget says that
// it does not know, and either all of it is done or nothing.
func TestForgetWhoseAnswerIsLost(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		commit := "COMMIT"
		if driver == "pgx" {
			commit = "commit"
		}
		for _, request := range []string{"DELETE FROM", commit} {
			db := testdb.PostgreSQL(t, driver)
			db.Repository(t, inboxsql.Options{})
			addExpired(t, db, "c", 10)
			proxy := testproxy.New(t, db.Address(t))
			repository := db.Through(t, proxy.Address()).RepositoryWithoutSchema(t, inboxsql.Options{})
			selection := inbox.Selection{Consumer: "c"}
			if _, err := inbox.Forget(context.Background(), repository, selection, 0); err == nil {
				t.Fatal("nothing is selected")
			}
			cut := proxy.CutAnswer(request, 0)
			deleted, err := inbox.Forget(context.Background(), repository, selection, 10)
			select {
			case <-cut:
			default:
				t.Fatalf("nothing was cut; the error is %v", err)
			}
			left := db.Count(t, `SELECT count(*) FROM watermill_inbox`)
			if err == nil || deleted != 0 || left != map[bool]int{true: 0, false: 10}[request == commit] {
				t.Errorf("%s: %d deleted, %d left, %v", request, deleted, left, err)
			}
		}
	})
}
