package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
)

var oneHour = inbox.Retention{Default: time.Hour}

// failing fails its first deletion; the second one tells that the cleaner went on.
type failing struct {
	*inboxtest.MemoryRepository
	calls    atomic.Int32
	wentOn   chan struct{}
	deletion error
}

func (f *failing) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now(), nil
}

func (f *failing) DeleteProcessed(context.Context, string, time.Duration, int) (int, error) {
	switch f.calls.Add(1) {
	case 1:
		return 0, f.deletion
	case 2:
		close(f.wentOn)
	}
	return 0, nil
}

func (f *failing) CountRecords(context.Context, inbox.Selection) (int, error) { return 3, nil }

// The cleaner is in nobody's way when the database is away: it says so and goes on with the next pass.
func TestCleanerGoesOnAfterAFailedPass(t *testing.T) {
	t.Parallel()
	logger := watermill.NewCaptureLogger()
	repository := &failing{wentOn: make(chan struct{}), deletion: errors.New("the database is away")}
	cleaner, err := inbox.NewCleaner(repository, inbox.CleanerOptions{Retention: oneHour, Interval: time.Millisecond, Logger: logger})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- cleaner.Run(ctx) }()
	<-repository.wentOn
	cancel()
	if err := <-done; err != context.Canceled {
		t.Fatalf("Run returned %v", err)
	}
	if got := logger.Captured()[watermill.ErrorLogLevel]; len(got) != 1 || !errors.Is(got[0].Err, repository.deletion) {
		t.Fatalf("error lines %v", got)
	}
	for _, line := range logger.Captured()[watermill.InfoLogLevel] {
		if line.Fields["unsent"] != 3 {
			t.Fatalf("line %v does not count what is kept", line)
		}
	}
}

// slow has five hundred expired records and times out on large batches.
type slow struct {
	*inboxtest.MemoryRepository
	left    int
	largest int // that does not time out
	sizes   []int
}

func (s *slow) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now(), nil
}

func (s *slow) DeleteProcessed(ctx context.Context, _ string, _ time.Duration, limit int) (int, error) {
	s.sizes = append(s.sizes, limit)
	if limit > s.largest {
		<-ctx.Done()
		return 0, ctx.Err()
	}
	deleted := min(limit, s.left)
	s.left -= deleted
	return deleted, nil
}

func TestCleanerMakesSmallerBatchesAfterATimeout(t *testing.T) {
	t.Parallel()
	options := inbox.CleanerOptions{Retention: oneHour, BatchSize: 400, BatchTimeout: 10 * time.Millisecond, BatchPause: time.Nanosecond}
	for largest, want := range map[int]struct {
		sizes []int
		left  int
	}{
		400: {[]int{400, 400}, 0},
		150: {[]int{400, 200, 100, 100, 100, 100, 100, 100}, 0},
		5:   {[]int{400, 200, 100, 50, 25, 12, 10}, 500}, // the smallest fails as well
	} {
		records := &slow{MemoryRepository: inboxtest.NewMemoryRepository(), left: 500, largest: largest}
		cleaner, err := inbox.NewCleaner(records, options)
		if err != nil {
			t.Fatal(err)
		}
		pass, err := cleaner.Pass(context.Background())
		if (err != nil) != (want.left > 0) || pass.Deleted != 500-want.left || !slices.Equal(records.sizes, want.sizes) {
			t.Errorf("up to %d: %+v, %v, batches %v, want %v", largest, pass, err, records.sizes, want.sizes)
		}
	}
}

// several consumers share what a pass has learned.
type several struct {
	*slow
	consumers []string
}

func (s several) Consumers(context.Context) ([]string, time.Time, error) {
	return s.consumers, time.Now(), nil
}

func TestCleanerKeepsSmallerBatchesForTheRestOfThePass(t *testing.T) {
	t.Parallel()
	records := several{&slow{MemoryRepository: inboxtest.NewMemoryRepository(), left: 100, largest: 150}, []string{"a", "b"}}
	cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{
		Retention: oneHour, BatchSize: 200, BatchTimeout: 10 * time.Millisecond, BatchPause: time.Nanosecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cleaner.Pass(context.Background()); err != nil {
		t.Fatal(err)
	}
	if want := []int{200, 100, 100, 100}; !slices.Equal(records.sizes, want) {
		t.Errorf("batches %v, want %v", records.sizes, want)
	}
}

// undeletable is a table whose policy lets nobody delete.
type undeletable struct {
	*inboxtest.MemoryRepository
	deletions int
}

func (u *undeletable) DeleteRecords(context.Context, []inbox.Found) (int, error) {
	u.deletions++
	return 0, nil
}

func TestCleanerEndsThoughUnsentRecordsStay(t *testing.T) {
	t.Parallel()
	records := &undeletable{MemoryRepository: inboxtest.NewMemoryRepository()}
	key := inbox.Key{Consumer: "consumer", MessageID: "1"}
	transaction, _, err := records.Claim(context.Background(), key)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(transaction.Store(context.Background(), []byte("unsent")), transaction.Commit(context.Background())); err != nil {
		t.Fatal(err)
	}
	records.Age(key, 3*time.Hour)
	cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{Retention: oneHour, UnsentRetention: 2 * time.Hour, BatchPause: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if pass, err := cleaner.Pass(ctx); err != nil || pass != (inbox.CleanerPass{Unsent: 1}) || records.deletions != 1 {
		t.Errorf("%+v, %v, after %d deletions", pass, err, records.deletions)
	}
}

// stuck waits for a lock that somebody has forgotten.
type stuck struct{ *inboxtest.MemoryRepository }

func (stuck) DeleteRecords(ctx context.Context, _ []inbox.Found) (int, error) {
	<-ctx.Done()
	return 0, ctx.Err()
}

func (stuck) FindRecords(_ context.Context, _ inbox.Selection, _ inbox.Key, _ int, each func(inbox.Key, inbox.Record)) error {
	each(inbox.Key{Consumer: "consumer", MessageID: "1"}, inbox.Record{})
	return nil
}

func (stuck) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now(), nil
}

func TestCleanerBoundsTheDeletionOfUnsentRecords(t *testing.T) {
	t.Parallel()
	cleaner, err := inbox.NewCleaner(stuck{inboxtest.NewMemoryRepository()}, inbox.CleanerOptions{
		Retention: oneHour, UnsentRetention: time.Hour, BatchTimeout: 10 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if _, err := cleaner.Pass(ctx); err == nil || ctx.Err() != nil {
		t.Errorf("%v, and the test's context: %v", err, ctx.Err())
	}
}

// counted tells how often it is asked.
type counted struct {
	*inboxtest.MemoryRepository
	passes *atomic.Int32
}

func (c counted) Consumers(context.Context) ([]string, time.Time, error) {
	c.passes.Add(1)
	return nil, time.Now(), nil
}

func TestCleanerPausesForTheLongestInterval(t *testing.T) {
	t.Parallel()
	var passes atomic.Int32
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	const cleaners = 20 // the pause varies
	done := make(chan error)
	for range cleaners {
		cleaner, err := inbox.NewCleaner(counted{inboxtest.NewMemoryRepository(), &passes}, inbox.CleanerOptions{Retention: oneHour, Interval: math.MaxInt64})
		if err != nil {
			t.Fatal(err)
		}
		go func() { done <- cleaner.Run(ctx) }()
	}
	for range cleaners {
		<-done
	}
	if got := passes.Load(); got != cleaners {
		t.Errorf("%d passes of %d cleaners", got, cleaners)
	}
}

// clock is a database whose clock is not ours.
type clock struct {
	*inboxtest.MemoryRepository
	ahead time.Duration
	t     *testing.T
}

func (c clock) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now().Add(c.ahead), nil
}

func (c clock) DeleteProcessed(context.Context, string, time.Duration, int) (int, error) {
	if c.ahead.Abs() > time.Hour {
		c.t.Errorf("something is deleted with a clock %s ahead", c.ahead)
	}
	return 0, nil
}

func TestCleanerTrustsNoClockThatHasJumped(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{0, 50 * time.Minute, -50 * time.Minute, 2 * time.Hour, -2 * time.Hour, 1000 * 24 * time.Hour} {
		cleaner, err := inbox.NewCleaner(clock{ahead: ahead, MemoryRepository: inboxtest.NewMemoryRepository(), t: t}, inbox.CleanerOptions{Retention: oneHour})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := cleaner.Pass(context.Background()); (err != nil) != (ahead.Abs() > time.Hour) {
			t.Errorf("%s ahead: %v", ahead, err)
		}
	}
}

// busy is a table on which another cleaner is at work after the first batch.
type busy struct {
	*inboxtest.MemoryRepository
	batches int
}

func (b *busy) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now(), nil
}

func (b *busy) DeleteProcessed(_ context.Context, _ string, _ time.Duration, limit int) (int, error) {
	if b.batches++; b.batches > 1 {
		return 0, fmt.Errorf("cannot delete: %w", inbox.ErrCleaning)
	}
	return limit, nil
}

func TestCleanerYields(t *testing.T) {
	t.Parallel()
	cleaner, err := inbox.NewCleaner(&busy{MemoryRepository: inboxtest.NewMemoryRepository()}, inbox.CleanerOptions{Retention: oneHour, BatchSize: 7})
	if err != nil {
		t.Fatal(err)
	}
	if pass, err := cleaner.Pass(context.Background()); err != nil || pass != (inbox.CleanerPass{Deleted: 7, Yielded: true}) {
		t.Errorf("%+v, %v", pass, err)
	}
}
